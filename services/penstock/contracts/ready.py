"""A released task as a worker receives it (`ready.schema.json`): one record a task, on `ready.<type>`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.core.completion import Fence
from penstock.core.task import Priority
from penstock.errors import InvalidRecord

# Looking up an enumeration's own members takes longer than all else that is done with a record.
_NAMES = {level: level.name for level in Priority}
_LEVELS = {level.name: level for level in Priority}

# Task-sync writes one where a partition's records are gone, to see how far workers have read: it is no task.
MARK = orjson.dumps({"mark": "what was here before is gone"})


# Not frozen: at the rate of stages the guard costs more than it guards.
@dataclass(slots=True)
class ReadyTask:
    """One attempt of one stage, free to be claimed.

    Attributes:
        fence: the attempt; every report about it must carry it.
        type: task type.
        context: what the handler is given.
        lease_ms: a worker silent about it for this long has lost it, in milliseconds.
        tries: vain tries of this stage so far.
        priority: in whose order a worker begins what it has in hand.
        traceparent: what the attempt's span hangs under; None when the task is not traced.
    """

    fence: Fence
    type: str
    context: Context
    lease_ms: int
    tries: int = 0
    priority: Priority = Priority.MEDIUM
    traceparent: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of the record."""
        fence = self.fence
        wire = {
            "id": fence.id,
            "type": self.type,
            "step": fence.step,
            "stage": fence.stage,
            "attempt": fence.attempt,
            "tries": self.tries,
            "priority": _NAMES[self.priority],
            "lease_ms": self.lease_ms,
            **self.context.to_wire(),
        }
        if self.traceparent is not None:
            wire["traceparent"] = self.traceparent
        return wire

    def encode(self) -> bytes:
        """The record's value."""
        return orjson.dumps(self.to_wire())

    @classmethod
    def decode(cls, data: bytes) -> ReadyTask:
        """Reads a record's value.

        Raises:
            InvalidRecord: not what task-sync writes.
        """
        try:
            return cls.from_wire(orjson.loads(data))
        except ValueError as error:
            raise InvalidRecord(f"not a ready record: {error!r}") from error

    @classmethod
    def from_wire(cls, raw: Any) -> ReadyTask:
        """Reads the JSON object of a record.

        Raises:
            InvalidRecord: not what task-sync writes.
        """
        try:
            context = Context.from_wire(raw)
            if context is None:
                raise InvalidRecord("context or context_ref is missing")
            return cls(
                fence=Fence(raw["id"], raw["step"], raw["stage"], raw["attempt"]),
                type=raw["type"],
                context=context,
                lease_ms=raw["lease_ms"],
                tries=raw.get("tries", 0),
                # Earlier versions wrote none, and a later one may know others: it decides nothing but the order here.
                priority=_LEVELS.get(raw.get("priority"), Priority.MEDIUM),
                traceparent=raw.get("traceparent"),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRecord(f"not a ready record: {error!r}") from error
