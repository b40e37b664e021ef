"""Flows and events for flows as producers submit them, over HTTP or on their topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.contracts import subscription
from penstock.contracts.context import ContentType, Context
from penstock.contracts.submission import CONTEXT_LIMIT_BYTES
from penstock.contracts.subscription import Entry
from penstock.contracts.validation import conform
from penstock.core.task import Priority
from penstock.errors import TooLarge

# Names of the schemas in schemas/messages.
FLOW_SCHEMA = "flows-submitted"
EVENT_SCHEMA = "flow-events-submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSubmission:
    """A flow to start (`flows-submitted.schema.json`).

    Attributes:
        flow: name of its definition.
        version: of the definition; None is the newest one.
        inputs: values by the names of declared inputs.
        priority: order of release of its tasks.
        idempotency_key: a second submission with the same flow and key returns the first flow.
        callbacks: targets of the flow's callbacks.
        events: the transitions that are published, "final" or "all"; None is "final".
        labels: free names and values.
    """

    flow: str
    version: int | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    priority: Priority = Priority.MEDIUM
    idempotency_key: str | None = None
    callbacks: tuple[Entry, ...] = ()
    events: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, raw: Any) -> FlowSubmission:
        """Validates and decodes one submission.

        Raises:
            InvalidRecord: the document breaks the schema; `pointer` is the field at fault.
            TooLarge: the inputs do not fit into a record.
        """
        conform(raw, FLOW_SCHEMA)
        _require_size(raw.get("inputs", {}), "inputs")
        return cls(
            flow=raw["flow"],
            # JSON Schema takes 2.0 for an integer.
            version=int(raw["version"]) if "version" in raw else None,
            inputs=raw.get("inputs", {}),
            priority=Priority[raw["priority"]] if "priority" in raw else Priority.MEDIUM,
            idempotency_key=raw.get("idempotency_key"),
            callbacks=subscription.read(raw.get("callbacks", ())),
            events=raw.get("events"),
            labels=raw.get("labels", {}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowEvent:
    """An event that flows wait for (`flow-events-submitted.schema.json`).

    Attributes:
        event: its name.
        id: a second event of the namespace with this id has no effect.
        key: the key of the waits that it ends.
        data: the output of the nodes that wait; None is null.
    """

    event: str
    id: str
    key: str = ""
    data: Context | None = None

    @classmethod
    def from_wire(cls, raw: Any) -> FlowEvent:
        """Validates and decodes one event.

        Raises:
            InvalidRecord: the document breaks the schema; `pointer` is the field at fault.
            TooLarge: the data does not fit into a record.
        """
        conform(raw, EVENT_SCHEMA)
        data = raw.get("data")
        return cls(
            event=raw["event"],
            id=raw["id"],
            key=raw.get("key", ""),
            data=None if data is None else _require_size(data, "data"),
        )


def _require_size(value: Any, name: str) -> Context:
    context = Context(ContentType.JSON, value=value)
    context.require_shallow(f"/{name}")
    if context.size > CONTEXT_LIMIT_BYTES:
        raise TooLarge(
            f"{context.size:,} bytes; {CONTEXT_LIMIT_BYTES:,} is the limit: "
            "store the value where workers can fetch it, and submit its URL",
            pointer=f"/{name}",
        )
    return context
