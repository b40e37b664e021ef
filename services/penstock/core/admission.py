"""Admission control: how many submissions may wait while PostgreSQL is behind.

A gateway refuses requests (`Admission`); a reader of a topic pauses partitions
(`partitions_to_pause`). Both count the submissions that are in memory and not yet in PostgreSQL, so
memory is bounded however long PostgreSQL stays behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeVar

# Bounds of the delay that a refused client receives, in seconds.
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0

Partition = TypeVar("Partition", bound=Hashable)


class RefusalCause(StrEnum):
    """The limit that a request exceeds."""

    LATE = "late"
    ROWS = "rows"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of the requests that wait.

    Attributes:
        rows: most tasks.
        size_bytes: most bytes of requests.
        wait_s: seconds that the oldest request may wait before PostgreSQL counts as behind.
    """

    rows: int
    size_bytes: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a request is refused, and when the client may repeat it.

    Attributes:
        cause: the limit that the request exceeds.
        reason: one sentence.
        retry_after_s: seconds.
    """

    cause: RefusalCause
    reason: str
    retry_after_s: float


class _Admitted(NamedTuple):
    rows: int
    size_bytes: int
    since_s: float


class Admission:
    """The requests that were admitted and are not answered yet.

    A request that exceeds the limits by itself is admitted when no other request waits.

    Args:
        limits: bounds of all waiting requests together.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._tickets = itertools.count()
        # In the order of admission, so that the first is the oldest.
        self._admitted: dict[int, _Admitted] = {}
        self.rows = 0
        self.size_bytes = 0

    def oldest_s(self, now_s: float) -> float:
        """Seconds that the oldest request has waited; 0 when none waits."""
        oldest = next(iter(self._admitted.values()), None)
        return 0.0 if oldest is None else max(0.0, now_s - oldest.since_s)

    def refusal(self, rows: int, size_bytes: int, now_s: float) -> Refusal | None:
        """Why a request of this many tasks and bytes is refused now; None when it is not."""
        if not self._admitted:
            return None
        limits, oldest_s = self._limits, self.oldest_s(now_s)
        # The longer PostgreSQL has been behind, the less often clients repeat.
        retry_after_s = min(max(oldest_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        if oldest_s > limits.wait_s:
            reason = (
                f"PostgreSQL is behind: the oldest submission has waited {oldest_s:.1f} s, "
                f"and {limits.wait_s:g} s are allowed"
            )
            return Refusal(RefusalCause.LATE, reason, retry_after_s)
        if self.rows + rows > limits.rows:
            reason = f"{self.rows:,} tasks wait for PostgreSQL, and {limits.rows:,} are allowed"
            return Refusal(RefusalCause.ROWS, reason, retry_after_s)
        if self.size_bytes + size_bytes > limits.size_bytes:
            reason = f"{self.size_bytes:,} bytes of tasks wait for PostgreSQL, and {limits.size_bytes:,} are allowed"
            return Refusal(RefusalCause.BYTES, reason, retry_after_s)
        return None

    def enter(self, rows: int, size_bytes: int, now_s: float) -> int:
        """Admits a request and returns its ticket."""
        ticket = next(self._tickets)
        self._admitted[ticket] = _Admitted(rows, size_bytes, now_s)
        self.rows += rows
        self.size_bytes += size_bytes
        return ticket

    def leave(self, ticket: int) -> None:
        """Removes a request that was answered."""
        request = self._admitted.pop(ticket)
        self.rows -= request.rows
        self.size_bytes -= request.size_bytes


class PartitionLoad(NamedTuple):
    """Records of one partition that were read and are not in PostgreSQL yet."""

    rows: int
    size_bytes: int


def partitions_to_pause(
    loads: Mapping[Partition, PartitionLoad], paused: Collection[Partition], *, rows: int, size_bytes: int
) -> set[Partition]:
    """The partitions that are not to be read for now.

    A partition pauses at either limit and resumes at half of both. The distance keeps it from
    pausing and resuming with every batch.

    Args:
        loads: what is in flight, by partition.
        paused: the partitions that are paused now.
        rows: records of one partition at which it pauses.
        size_bytes: bytes of one partition at which it pauses.
    """
    partitions = set()
    for partition, load in loads.items():
        full = load.rows >= rows or load.size_bytes >= size_bytes
        over_half = load.rows * 2 > rows or load.size_bytes * 2 > size_bytes
        if full or (over_half and partition in paused):
            partitions.add(partition)
    return partitions
