"""What consumers and callback targets are told (`event.schema.json`), and callbacks on their way (`callback.schema.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.contracts.revocation import Revocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A transition of a task.

    Attributes:
        id: the same whenever this event is sent again: `<task>-<step>-<attempt>-<word>`.
        name: `task.` and a word: succeeded, failed, cancelled, advanced, retried, expired.
        at: when it was committed.
        task: id, type, stage, step, attempt, state, labels and idempotency key after the transition.
        detail: `result` fields of a task that succeeded, `error` of one that failed.
    """

    id: str
    name: str
    at: datetime
    task: Mapping[str, Any]
    detail: Mapping[str, Any]

    def encode(self) -> bytes:
        """The record's value and, to the byte, the body of the callback."""
        return orjson.dumps(
            {
                "id": self.id,
                "event": self.name,
                "at": self.at.astimezone(UTC),
                "task": self.task,
                **self.detail,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """One event on its way to one target.

    Attributes:
        id: stays the same for all attempts; sent as `webhook-id`.
        target: URL.
        task_id: the task it tells of.
        attempt: how many attempts were made before this record was written.
        body: what is sent, to the byte.
    """

    id: str
    target: str
    task_id: int
    attempt: int
    body: bytes

    def encode(self) -> bytes:
        """The record's value; the body is JSON and is carried as such."""
        return orjson.dumps(
            {
                "id": self.id,
                "target": self.target,
                "task_id": self.task_id,
                "attempt": self.attempt,
                "body": self.body.decode(),
            }
        )


@dataclass(slots=True)
class Owed:
    """What a transaction owes to Kafka.

    Attributes:
        outbox_id: the row to remove once the events are on Kafka; None when there are none.
        keys: of the event records.
        events: their values.
        callbacks: their records.
        revocation: leases to take back; not kept for after a crash, since the fence sees to what is not heard.
    """

    outbox_id: int | None = None
    keys: list[bytes] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)
    revocation: Revocation | None = None
