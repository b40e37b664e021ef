"""A task as a producer submits it (`submitted.schema.json`), over HTTP or on the topic."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from penstock.contracts import subscription
from penstock.contracts.context import Context
from penstock.contracts.subscription import Entry
from penstock.contracts.task_fields import FIELD_NAMES, TaskFields
from penstock.contracts.validation import conform
from penstock.core.task import Priority
from penstock.errors import InvalidRecord, TooLarge

# A submission with a larger context is refused, because it would not fit into a record of the topic
# `submitted`. Results of handlers have no such limit: they go to the object store before a record
# is written.
CONTEXT_LIMIT_BYTES = 900_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission(TaskFields):
    """A task to create: the fields of `TaskFields`, and those that are converted.

    Attributes:
        context: the input of the first stage.
        priority: order of release within the type.
        run_at: the earliest moment of release; None is at once.
        callbacks: targets of the task's callbacks; None is the type's list, which any other value
            replaces, also an empty one.
        traceparent: the span of the submission, if it is sampled; producers do not send it.
        context_digest: of the context, when the type compares contexts; producers do not send it.
        rerun_of: the task that this one runs again; producers do not send it.
    """

    context: Context
    priority: Priority = Priority.MEDIUM
    run_at: datetime | None = None
    callbacks: tuple[Entry, ...] | None = None
    traceparent: str | None = None
    context_digest: bytes | None = None
    rerun_of: int | None = None

    @classmethod
    def from_wire(cls, raw: Any) -> Submission:
        """Validates and decodes one submission.

        Raises:
            InvalidRecord: the document breaks the schema or contradicts itself; `pointer` is the
                field at fault.
            TooLarge: the context does not fit into a record.
        """
        conform(raw, "submitted")
        context = Context.from_wire(raw) or Context.encode(None)
        context.require_shallow()
        if context.size > CONTEXT_LIMIT_BYTES:
            raise TooLarge(
                f"the context has {context.size:,} bytes; {CONTEXT_LIMIT_BYTES:,} is the limit: "
                "store it where workers can fetch it, and submit its URL",
                pointer="/context",
            )
        return cls(
            **{name: raw[name] for name in FIELD_NAMES if name in raw},
            priority=Priority[raw["priority"]] if "priority" in raw else Priority.MEDIUM,
            context=context,
            run_at=_moment(raw["run_at"]) if "run_at" in raw else None,
            callbacks=subscription.read(raw["callbacks"]) if "callbacks" in raw else None,
        )


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        # The schema's date-time admits moments that Python's calendar lacks, such as leap seconds.
        raise InvalidRecord(
            f"not a moment that can be stored: {error}; send another moment", pointer="/run_at"
        ) from error
