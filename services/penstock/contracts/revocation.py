"""What the platform takes back from workers (`revoked.schema.json`): leases on attempts that nobody wants any more.

Every worker reads all of it, from the time on at which it started; one that misses a record runs an attempt in vain,
and its fence sees to the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from penstock.core.leases import Key
from penstock.errors import InvalidRecord


@dataclass(frozen=True, slots=True)
class Revocation:
    """Leases taken back.

    Attributes:
        why: "cancelled", "expired", "over" (before it was claimed) or "superseded" (an earlier attempt's late result
            was accepted).
        tasks: the attempts, as (task id, step, attempt).
    """

    why: str
    tasks: Sequence[Key]

    def encode(self) -> bytes:
        """The record's value."""
        return orjson.dumps({"why": self.why, "tasks": self.tasks})

    @classmethod
    def decode(cls, data: bytes) -> Revocation:
        """Reads a record's value.

        Raises:
            InvalidRecord: not what the platform writes.
        """
        try:
            raw = orjson.loads(data)
            return cls(raw["why"], [(task, step, attempt) for task, step, attempt in raw["tasks"]])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRecord(f"not a revocation: {error!r}") from error
