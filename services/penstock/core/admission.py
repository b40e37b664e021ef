"""Whether more submissions are taken in while PostgreSQL is behind.

A gateway refuses requests (`Admission`), a reader of a topic pauses partitions (`crowded`). Both go by what they hold and
PostgreSQL does not have yet, so memory is bounded however long it stays behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeVar

# Of what a refused client is told to wait, in seconds.
SHORTEST_S = 1.0
LONGEST_S = 30.0

Reader = TypeVar("Reader", bound=int)


class Why(StrEnum):
    """What a refusal goes by."""

    LATE = "late"
    ROWS = "rows"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Limits:
    """What may wait.

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
    """Why a request is not taken, and when it may come again.

    Attributes:
        why: which limit.
        reason: one sentence.
        retry_after_s: seconds.
    """

    why: Why
    reason: str
    retry_after_s: float


class _Entry(NamedTuple):
    rows: int
    size_bytes: int
    since_s: float


class Admission:
    """The requests that were taken and are not answered yet.

    One that fits nowhere is taken all the same when nothing waits.

    Args:
        limits: how much that may be.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tickets = itertools.count()
        # In the order of their coming, so that the first is the oldest.
        self._entries: dict[int, _Entry] = {}
        self.rows = 0
        self.size_bytes = 0

    def oldest_s(self, now_s: float) -> float:
        """How long the oldest has been waiting, in seconds; 0 when none is."""
        oldest = next(iter(self._entries.values()), None)
        return 0.0 if oldest is None else max(0.0, now_s - oldest.since_s)

    def refusal(self, rows: int, size_bytes: int, now_s: float) -> Refusal | None:
        """Why a request of so many tasks and bytes is not taken now; None when it is."""
        if not self._entries:
            return None
        limits, oldest_s = self._limits, self.oldest_s(now_s)
        # Who has waited long will wait a while yet.
        retry_after_s = min(max(oldest_s, SHORTEST_S), LONGEST_S)
        if oldest_s > limits.wait_s:
            reason = (
                f"PostgreSQL is behind: what came {oldest_s:.1f} s ago waits, of {limits.wait_s:g} s allowed"
            )
            return Refusal(Why.LATE, reason, retry_after_s)
        if self.rows + rows > limits.rows:
            reason = f"{self.rows:,} tasks wait for PostgreSQL, of {limits.rows:,} that may"
            return Refusal(Why.ROWS, reason, retry_after_s)
        if self.size_bytes + size_bytes > limits.size_bytes:
            reason = (
                f"{self.size_bytes:,} bytes of tasks wait for PostgreSQL, of {limits.size_bytes:,} that may"
            )
            return Refusal(Why.BYTES, reason, retry_after_s)
        return None

    def enter(self, rows: int, size_bytes: int, now_s: float) -> int:
        """Takes a request; returns its ticket."""
        ticket = next(self._tickets)
        self._entries[ticket] = _Entry(rows, size_bytes, now_s)
        self.rows += rows
        self.size_bytes += size_bytes
        return ticket

    def leave(self, ticket: int) -> None:
        """It was answered."""
        entry = self._entries.pop(ticket)
        self.rows -= entry.rows
        self.size_bytes -= entry.size_bytes


class Load(NamedTuple):
    """What is in hand of one partition."""

    rows: int
    size_bytes: int


def crowded(
    in_hand: Mapping[Reader, Load], paused: Collection[Reader], *, rows: int, size_bytes: int
) -> set[Reader]:
    """Those partitions that are not read on for now.

    One that is read stops at either limit; one that is paused goes on when no more than half of both is left, so that none is
    stopped and started with every batch.

    Args:
        in_hand: what was read and is not in PostgreSQL, by partition.
        paused: which are paused now.
        rows: records of one partition at which it is paused.
        size_bytes: bytes of one partition at which it is paused.
    """
    found = set()
    for reader, load in in_hand.items():
        full = load.rows >= rows or load.size_bytes >= size_bytes
        half = load.rows * 2 > rows or load.size_bytes * 2 > size_bytes
        if full or (half and reader in paused):
            found.add(reader)
    return found
