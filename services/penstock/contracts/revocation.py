"""Revocations of leases (`revoked.schema.json`).

Every worker reads all of them from its start on. A worker that misses one keeps running the
attempt, and the fence rejects its result. While Kafka is away the writer keeps its revocations; if
it dies, the sweeper writes those of cancelled tasks. The heartbeat processor writes the revocation
again after each heartbeat for an attempt that is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from penstock.core.attempt import AttemptId
from penstock.errors import InvalidRecord


@dataclass(frozen=True, slots=True)
class Revocation:
    """Leases that are revoked.

    Attributes:
        why: "cancelled" (workers stop all attempts of these tasks), "expired", "over" (the attempt
            ended before its claim came) or "superseded" (a late result of an earlier attempt was
            accepted).
        tasks: the attempts.
    """

    why: str
    tasks: Sequence[AttemptId]

    def encode(self) -> bytes:
        """The record's value."""
        return orjson.dumps({"why": self.why, "tasks": [tuple(attempt_id) for attempt_id in self.tasks]})

    @classmethod
    def decode(cls, data: bytes) -> Revocation:
        """Reads a record's value.

        Raises:
            InvalidRecord: it is no revocation.
        """
        try:
            raw = orjson.loads(data)
            why, attempt_ids = (
                raw["why"],
                [AttemptId(task, step, attempt) for task, step, attempt in raw["tasks"]],
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRecord(f"not a revocation: {error!r}") from error
        if type(why) is not str or any(type(part) is not int for each in attempt_ids for part in each):
            raise InvalidRecord("not a revocation: `why` is a text, and attempts are three integers each")
        return cls(why, attempt_ids)
