"""A task as a producer submits it (`submitted.schema.json`): over HTTP, by the client or on the topic."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock.contracts import subscription
from penstock.contracts.context import Context
from penstock.contracts.subscription import Entry
from penstock.contracts.validation import conform
from penstock.core.task import Priority
from penstock.errors import InvalidRecord, TooLarge

# A submitted context larger than this is refused: it does not fit a record of `submitted` together with its envelope.
# What handlers return has no such limit: it goes to the object store before anything is written to Kafka.
CONTEXT_LIMIT_BYTES = 900_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A task to be.

    Attributes:
        type: name of a registered task type.
        stage: where to begin; None is the type's first stage.
        priority: which goes first within the type.
        context: what the first stage is given.
        key: tenant or resource that it counts for in limits and turns of its type; None is none.
        idempotency_key: a second submission with the same type and key returns the first task.
        run_at: not to be released before.
        callbacks: targets to be called at each subscribed transition; None is the type's choice, which an empty one
            replaces like any other.
        events: which transitions are reported, "final" or "all"; None is the type's choice.
        labels: free names and values, for finding tasks again.
        traceparent: of the span that submits it, if it is sampled; not part of what a producer sends.
    """

    type: str
    context: Context
    stage: str | None = None
    priority: Priority = Priority.MEDIUM
    key: str | None = None
    idempotency_key: str | None = None
    run_at: datetime | None = None
    callbacks: tuple[Entry, ...] | None = None
    events: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None

    @classmethod
    def from_wire(cls, raw: Any) -> Submission:
        """Validates and reads one submission.

        Raises:
            InvalidRecord: the document breaks the schema or contradicts itself; `pointer` tells where.
            TooLarge: the context is beyond what a record can carry.
        """
        conform(raw, "submitted")
        context = Context.from_wire(raw) or Context.encode(None)
        context.require_shallow()
        if context.size > CONTEXT_LIMIT_BYTES:
            raise TooLarge(
                f"the context has {context.size:,} bytes; {CONTEXT_LIMIT_BYTES:,} is the limit: "
                "put it where workers can fetch it and submit its URL",
                pointer="/context",
            )
        return cls(
            type=raw["type"],
            stage=raw.get("stage"),
            priority=Priority[raw["priority"]] if raw.get("priority") else Priority.MEDIUM,
            context=context,
            key=raw.get("key"),
            idempotency_key=raw.get("idempotency_key"),
            run_at=_moment(raw["run_at"]) if raw.get("run_at") else None,
            callbacks=subscription.read(raw["callbacks"]) if "callbacks" in raw else None,
            events=raw.get("events"),
            labels=dict(raw.get("labels") or {}),
        )

    def to_wire(self) -> dict[str, Any]:
        """The JSON object a producer sends; what is left at its default is left out."""
        wire: dict[str, Any] = {"type": self.type, **self.context.to_wire()}
        if self.stage is not None:
            wire["stage"] = self.stage
        if self.priority is not Priority.MEDIUM:
            wire["priority"] = self.priority.name
        if self.key is not None:
            wire["key"] = self.key
        if self.idempotency_key is not None:
            wire["idempotency_key"] = self.idempotency_key
        if self.run_at is not None:
            wire["run_at"] = self.run_at.isoformat()
        if self.callbacks is not None:
            wire["callbacks"] = subscription.to_wire(self.callbacks)
        if self.events is not None:
            wire["events"] = self.events
        if self.labels:
            wire["labels"] = self.labels
        return wire


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        # The schema's date-time lets through what Python's calendar has not, such as leap seconds.
        raise InvalidRecord(f"not a moment we can keep: {error}", pointer="/run_at") from error
