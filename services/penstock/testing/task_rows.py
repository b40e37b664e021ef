"""The rows of a pipeline's tasks, and the documents that the gateway shows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.contracts import subscription
from penstock.contracts.context import Context
from penstock.contracts.result import Failure
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.core.task import Priority, State


@dataclass(frozen=True, slots=True)
class FlowPlace:
    """The place of a task in a flow.

    Attributes:
        flow_id: the flow.
        root_id: the root of the flow's family.
        priority: of the root.
        node: the node.
        generation: in which the node started the task.
        item: of a map; None for another node.
        since: when the root started.
    """

    flow_id: int
    root_id: int
    priority: int
    node: str
    generation: int
    item: int | None
    since: datetime


@dataclass(slots=True, kw_only=True)
class EndedAttempt:
    """A row of the history."""

    step: int
    attempt: int
    stage: str
    outcome: Outcome
    worker: str | None
    error: Failure | None
    started_at: datetime | None
    finished_at: datetime


@dataclass(slots=True, kw_only=True)
class TaskRow:
    """A task."""

    id: int
    type: str
    state: State
    stage: str
    priority: Priority
    context: Context
    created_at: datetime
    updated_at: datetime
    step: int = 0
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    result: Context | None = None
    error: Failure | None = None
    key: str | None = None
    idempotency_key: str | None = None
    context_digest: bytes | None = None
    events: str = "final"
    labels: Mapping[str, str] = field(default_factory=dict)
    due_at: datetime | None = None
    finished_at: datetime | None = None
    worker: str | None = None
    pausing: bool = False
    # As in the column.
    callbacks: Sequence[str] | None = None
    flow: FlowPlace | None = None
    attempts: list[EndedAttempt] = field(default_factory=list)

    @property
    def attempt_id(self) -> AttemptId:
        """The current attempt."""
        return AttemptId(self.id, self.step, self.attempt)

    @property
    def fence(self) -> Fence:
        """The current attempt, with its stage."""
        return Fence(self.id, self.step, self.stage, self.attempt)


def document_of(row: TaskRow, value_of: Callable[[Context], Mapping[str, Any]]) -> dict[str, Any]:
    """The task as the gateway shows it.

    Args:
        row: the task.
        value_of: returns the wire form of a context, with its value in place of a reference.
    """
    document: dict[str, Any] = {
        "id": row.id,
        "type": row.type,
        "state": row.state.value,
        "stage": row.stage,
        "step": row.step,
        "attempt": row.attempt,
        "priority": row.priority.name,
        "key": row.key,
        "idempotency_key": row.idempotency_key,
        "events": row.events,
        "labels": dict(row.labels),
        "pausing": row.pausing,
        "callbacks": subscription.masked(subscription.from_columns(row.callbacks)),
        # A pipeline calls nothing.
        "callbacks_owed": [],
        "worker": row.worker,
        "due_at": row.due_at,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
        "finished_at": row.finished_at,
        "error": row.error.to_wire() if row.error else None,
        **value_of(row.context),
        "attempts": [
            {
                "step": each.step,
                "attempt": each.attempt,
                "stage": each.stage,
                "outcome": each.outcome.value,
                "worker": each.worker,
                "error": each.error.to_wire() if each.error else None,
                "started_at": each.started_at,
                "finished_at": each.finished_at,
            }
            for each in row.attempts
        ],
    }
    if row.flow is not None:
        place = row.flow
        document["flow"] = {"id": place.flow_id, "node": place.node, "generation": place.generation}
        if place.item is not None:
            document["flow"]["item"] = place.item
    if row.result is not None:
        shown = value_of(row.result)
        document["result_type"], document["result"] = shown["content_type"], shown["context"]
    return document
