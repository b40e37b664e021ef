"""A released task (`ready.schema.json`): one record a task, on `ready.<type>`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence
from penstock.core.suspects import Isolation
from penstock.core.task import Priority
from penstock.errors import InvalidRecord

# A lookup of an enumeration's members takes longer than all other work on a record.
_NAMES = {level: level.name for level in Priority}
_LEVELS = {level.name: level for level in Priority}
# Without an entry for None: only suspects have the field.
_ISOLATIONS = {isolation.value: isolation for isolation in Isolation}

_MAX_ID = 2**63 - 1
_MAX_INTEGER = 2**31 - 1
# A claim with a longer lease breaks `heartbeat.schema.json`.
_MAX_LEASE_MS = 86_400_000
_MAX_TEXT = 200

# Not a task: task-sync writes a marker where a partition's records are gone, to see how far workers
# have read.
MARKER = orjson.dumps({"mark": "what was here before is gone"})


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
        isolation: how to run a task whose stage has lost a worker; None for all others.
        token: proves reports about the attempt on Kafka; None when the platform asks for none.
        goes_on: whether a worker may go on with the next stage by itself (`core.going_on`).
        goes_on_until_s: until when, on the worker's monotonic clock; not on the wire. 0 is never.
        attempt_id: the attempt without its stage; a worker looks it up a dozen times.
    """

    fence: Fence
    type: str
    context: Context
    lease_ms: int
    tries: int = 0
    priority: Priority = Priority.MEDIUM
    traceparent: str | None = None
    isolation: Isolation | None = None
    token: str | None = None
    goes_on: bool = False
    goes_on_until_s: float = 0.0
    attempt_id: AttemptId = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.attempt_id = self.fence.attempt_id

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
        if self.isolation is not None:
            wire["isolation"] = self.isolation.value
        if self.token is not None:
            wire["token"] = self.token
        if self.goes_on:
            wire["goes_on"] = True
        return wire

    def encode(self) -> bytes:
        """The record's value."""
        return orjson.dumps(self.to_wire())

    @classmethod
    def decode(cls, data: bytes, expected_type: str | None = None) -> ReadyTask:
        """Reads a record's value.

        Args:
            data: the value.
            expected_type: the type of the topic; None is any.

        Raises:
            InvalidRecord: not what task-sync writes.
        """
        try:
            ready = cls.from_wire(orjson.loads(data))
        except (ValueError, RecursionError) as error:
            raise InvalidRecord(f"not a ready record: {error!r}") from error
        if expected_type is not None and ready.type != expected_type:
            raise InvalidRecord(f"a task of type {ready.type!r} on the topic of {expected_type!r}")
        return ready

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
            fence = Fence(raw["id"], raw["step"], raw["stage"], raw["attempt"])
            ready = cls(
                fence=fence,
                type=raw["type"],
                context=context,
                lease_ms=raw["lease_ms"],
                tries=raw.get("tries", 0),
                # A later version may have more levels; it only decides the order here.
                priority=_LEVELS.get(raw.get("priority"), Priority.MEDIUM),
                traceparent=raw.get("traceparent"),
                isolation=_ISOLATIONS.get(raw.get("isolation")),
                token=raw.get("token"),
                goes_on=raw.get("goes_on") is True,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRecord(f"not a ready record: {error!r}") from error
        if not _has_types(ready):
            raise InvalidRecord(
                "not a ready record: id, step, attempt, tries and lease_ms are integers in their ranges; "
                "type, stage, traceparent and token are texts"
            )
        return ready


# One record of another form must not end the worker, or spoil the claim of a whole poll. JSON
# Schema takes too long for each task, and the SDK comes without it.
def _has_types(ready: ReadyTask) -> bool:
    fence, traceparent = ready.fence, ready.traceparent
    return (
        type(fence.id) is type(fence.step) is type(fence.attempt) is int
        and type(ready.lease_ms) is type(ready.tries) is int
        and type(fence.stage) is type(ready.type) is str
        and 1 <= fence.id <= _MAX_ID
        and 0 <= fence.step <= _MAX_INTEGER
        and 0 <= fence.attempt <= _MAX_INTEGER
        and 1 <= ready.lease_ms <= _MAX_LEASE_MS
        and ready.tries >= 0
        and 1 <= len(fence.stage) <= _MAX_TEXT
        and (traceparent is None or type(traceparent) is str)
        and (ready.token is None or type(ready.token) is str)
    )
