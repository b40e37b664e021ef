"""What a worker says of the tasks in its hands (`heartbeat.schema.json`), keyed by worker so that order holds.

`claim` before the offset is committed, `beat` while they run, `release` once their results are on Kafka.
This module only encodes, so that the SDK stays light; `penstock.contracts.inbound` reads and validates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from penstock.core.leases import Key


class Kind(StrEnum):
    """What is said."""

    CLAIM = "claim"
    BEAT = "beat"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One record: one thing said of many tasks.

    Attributes:
        kind: claim, beat or release.
        worker: id of the worker process.
        lease_ms: how long the leases last without a sign of life, in milliseconds (0 with release).
        tasks: the attempts, as (task id, step, attempt).
        max_attempts: tries, the first included, that the stage of each of these attempts may have; None is their type's
            limit. What has another limit is said in a record of its own, as what has another lease is.
    """

    kind: Kind
    worker: str
    lease_ms: int
    tasks: Sequence[Key]
    max_attempts: int | None = None

    def encode(self) -> bytes:
        """The record's value."""
        wire: dict[str, Any] = {
            "kind": self.kind,
            "worker": self.worker,
            "lease_ms": self.lease_ms,
            "tasks": self.tasks,
        }
        if self.max_attempts is not None:
            wire["max_attempts"] = self.max_attempts
        return orjson.dumps(wire)
