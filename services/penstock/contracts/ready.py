"""A released task (`ready.schema.json`): one record a task, on `ready.<type>`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.core.completion import Fence
from penstock.core.task import Priority
from penstock.errors import InvalidRecord

# A lookup of an enumeration's members takes longer than all other work on a record.
_NAMES = {level: level.name for level in Priority}
_LEVELS = {level.name: level for level in Priority}

# Not a task: task-sync writes a mark where a partition's records are gone, to see how far workers
# have read.
MARK = orjson.dumps({"mark": "what was here before is gone"})


# Not frozen: constructing a frozen dataclass is slower, and one is made for each task that is
# released.
@dataclass(slots=True)
class ReadyTask:
    """One attempt of one stage, to be claimed by a worker.

    Attributes:
        fence: the attempt; every report about it must carry it.
        type: task type.
        context: for the handler.
        lease_ms: how long its lease lasts without a heartbeat, in milliseconds.
        tries: failed attempts of this stage so far.
        priority: order in which a worker starts the attempts it has claimed.
        traceparent: of the parent of the attempt's span; None when the task is not traced.
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
                # Missing in earlier versions, perhaps unknown in later ones; it only decides the
                # order here.
                priority=_LEVELS.get(raw.get("priority"), Priority.MEDIUM),
                traceparent=raw.get("traceparent"),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRecord(f"not a ready record: {error!r}") from error
