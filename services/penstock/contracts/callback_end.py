"""The records of a callback that has ended: its result, and its dead letter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import orjson

from penstock.contracts.event import Callback

RESULTS = "callbacks.results"
DEAD = "callbacks.dead"


class EndRecord(NamedTuple):
    """A record about a callback that has ended.

    Attributes:
        callback_id: the callback.
        topic: without the prefix.
        key: of the record.
        value: of the record.
    """

    callback_id: str
    topic: str
    key: bytes
    value: bytes


# Not frozen: there is one per call, and freezing costs time.
@dataclass(slots=True, kw_only=True)
class CallbackEnd:
    """The end of a callback.

    Attributes:
        callback: as it was received.
        outcome: delivered or dead.
        attempts: all of them, including the last one; 0 when it was never called.
        at: when it ended.
        status: HTTP status of the last attempt, if it ended the callback and had an answer.
        took_s: duration of that attempt in seconds; None when no attempt ended the callback.
        error: why the callback is dead; None when it was delivered.
    """

    callback: Callback
    outcome: str
    attempts: int
    at: datetime
    status: int | None = None
    took_s: float | None = None
    error: dict[str, Any] | None = None

    def records(self) -> Iterable[EndRecord]:
        """Its result on `callbacks.results`, and if it is dead, its letter on `callbacks.dead`."""
        callback = self.callback
        result = {
            "id": callback.id,
            "target": callback.target.url,
            "task_id": callback.task_id,
            "outcome": self.outcome,
            "attempts": self.attempts,
            "status": self.status,
            "took_ms": None if self.took_s is None else round(self.took_s * 1000),
            "error": self.error,
            "at": self.at,
        }
        yield EndRecord(callback.id, RESULTS, str(callback.task_id).encode(), orjson.dumps(result))
        if self.outcome == "dead":
            letter = {
                "id": callback.id,
                "target": callback.target.url,
                "task_id": callback.task_id,
                "attempt": self.attempts,
                "body": callback.body.decode(),
                "error": self.error,
                "dead_at": self.at,
                **callback.masked_options(),
            }
            yield EndRecord(callback.id, DEAD, callback.target.url.encode(), orjson.dumps(letter))
