"""The values about flows that the client accepts and returns, decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.client.models import filter_wire
from penstock.core.flow.state import FlowStatus
from penstock.core.task import Priority


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow at the moment of the gateway's answer.

    Attributes:
        id: flow id.
        name: name of the definition.
        version: version of the definition.
        status: running, succeeded, failed or cancelled.
        paused: whether nothing of it starts until it is resumed.
        generation: number of its recoveries.
        priority: order of release of its tasks.
        labels: labels of its start.
        inputs: the inputs; None in lists.
        output: the result; None before the flow has succeeded, and in lists.
        error: why it failed; None without a reason.
        nodes: all nodes, one `FlowNode` document of the API's description each; empty in lists.
        raw: the whole document of the gateway.
    """

    id: int
    name: str
    version: int
    status: FlowStatus
    paused: bool
    generation: int
    priority: Priority
    labels: Mapping[str, str]
    inputs: Any
    output: Any
    error: str | None
    nodes: Sequence[Mapping[str, Any]]
    raw: Mapping[str, Any]

    @property
    def ended(self) -> bool:
        """Whether the status is final: succeeded, failed or cancelled."""
        return self.status is not FlowStatus.RUNNING

    @property
    def counts(self) -> dict[str, int]:
        """The number of nodes by status."""
        return dict(Counter(node["status"] for node in self.nodes))

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> Flow:
        """Decodes a document of the gateway."""
        return cls(
            id=raw["id"],
            name=raw["name"],
            version=raw["version"],
            status=FlowStatus(raw["status"]),
            paused=raw["paused"],
            generation=raw["generation"],
            priority=Priority[raw["priority"]],
            labels=raw["labels"],
            inputs=raw.get("inputs"),
            output=raw.get("output"),
            error=raw["error"],
            nodes=raw.get("nodes", ()),
            raw=raw,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFilter:
    """A filter of flows: a flow must match all attributes that are set; set at least one.

    Child flows match by `ids` only.

    Attributes:
        ids: flow ids; at most 10,000.
        name: name of the definition.
        version: version of the definition.
        statuses: one of these states; by default every state in which the verb applies.
        labels: labels that the flow has, with these values.
        created_since: started at this moment or later; a naive moment is local time, here and
            below.
        created_until: started before this moment.
        finished_since: ended at this moment or later.
        finished_until: ended before this moment.
        error: part of the flow's error, in upper or lower case.
        schedule: of this schedule, its backfills included.
    """

    ids: Sequence[int] = ()
    name: str | None = None
    version: int | None = None
    statuses: Sequence[FlowStatus | str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    created_since: datetime | None = None
    created_until: datetime | None = None
    finished_since: datetime | None = None
    finished_until: datetime | None = None
    error: str | None = None
    schedule: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """The JSON object `FlowFilter` of the API's description."""
        return filter_wire(self)
