"""Leases: who holds which attempt, and whose time is up. A hashed timing wheel; time is an argument.

A sign of life only writes down when it was seen, O(1). A lease sits in the slot in which it would expire by
what was known when it was put there; when that slot comes round it is looked at again and either expires or
moves to the slot of its later deadline. So a lease is looked at about once a timeout, however often it beats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# (task id, step, attempt): what a lease is held on.
Key = tuple[int, int, int]


@dataclass(slots=True)
class Lease:
    """A worker's right to one attempt.

    Attributes:
        key: the attempt.
        worker: who holds it.
        timeout_s: seconds without a sign of life after which it expires.
        seen_s: when the last sign of life was seen, on the caller's clock.
        partition: the heartbeats partition over which its signs of life come.
        max_attempts: tries, the first included, that the attempt's stage may have; None is its type's limit.
    """

    key: Key
    worker: str
    timeout_s: float
    seen_s: float
    partition: int
    max_attempts: int | None = None

    @property
    def deadline_s(self) -> float:
        """When it expires unless there is another sign of life."""
        return self.seen_s + self.timeout_s


class LeaseWheel:
    """All live leases of one processor.

    Args:
        tick_s: width of a slot in seconds: an expiry is noticed at most this late.
    """

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._leases: dict[Key, Lease] = {}
        self._slots: dict[int, list[Lease]] = {}
        self._next_slot: int | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, key: Key) -> Lease | None:
        """The lease on this attempt, if there is one."""
        return self._leases.get(key)

    def holders(self) -> set[str]:
        """Every worker that holds a lease."""
        return {lease.worker for lease in self._leases.values()}

    def grant(self, lease: Lease) -> None:
        """Begins a lease, or replaces the one there was on the same attempt."""
        self._leases[lease.key] = lease
        self._file(lease)

    def beat(self, key: Key, worker: str, now_s: float) -> bool:
        """Writes down a sign of life; False when this worker holds no such lease."""
        lease = self._leases.get(key)
        if lease is None or lease.worker != worker:
            return False
        lease.seen_s = max(lease.seen_s, now_s)
        return True

    def release(self, key: Key, worker: str) -> bool:
        """Ends a lease; False when this worker holds no such lease."""
        lease = self._leases.get(key)
        if lease is None or lease.worker != worker:
            return False
        del self._leases[key]
        return True

    def forget(self, partitions: frozenset[int]) -> int:
        """Drops the leases of partitions that belong to another processor now; returns how many."""
        gone = [key for key, lease in self._leases.items() if lease.partition in partitions]
        for key in gone:
            del self._leases[key]
        return len(gone)

    def expired(self, now_s: float, read_until_s: Mapping[int, float] | None = None) -> list[Lease]:
        """Takes out and returns the leases whose time is up, oldest deadline first.

        Args:
            now_s: seconds on the caller's clock.
            read_until_s: until when everything that was said over a partition is known to have been read: later
                silence is not the worker's, but the reader's. A partition that is not in it expires nothing.
                None: everything was read.
        """
        current = math.floor(now_s / self._tick_s)
        due = [slot for slot in self._slots if slot < current]
        self._next_slot = current
        found: list[Lease] = []
        for slot in sorted(due):
            for lease in self._slots.pop(slot):
                if self._leases.get(lease.key) is not lease:
                    continue  # released or replaced since it was filed here
                known_s = now_s if read_until_s is None else read_until_s.get(lease.partition, -math.inf)
                if lease.deadline_s <= min(now_s, known_s):
                    del self._leases[lease.key]
                    found.append(lease)
                else:
                    self._file(lease)
        found.sort(key=lambda lease: lease.deadline_s)
        return found

    def _file(self, lease: Lease) -> None:
        slot = math.floor(lease.deadline_s / self._tick_s)
        if self._next_slot is not None:
            # Never behind the hand: a slot that has passed would only be looked at by accident.
            slot = max(slot, self._next_slot)
        self._slots.setdefault(slot, []).append(lease)
