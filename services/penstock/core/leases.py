"""Leases of workers on attempts, in a hashed timing wheel; time is an argument.

A heartbeat only stores when it was seen, in O(1). A lease is in the slot in which it would expire
without another heartbeat. When that slot's time comes, the lease expires or moves to the slot of
its later deadline. So a lease is checked about once a timeout, however many heartbeats there are.
A lease that ends leaves its slot at once: otherwise each short attempt of a type with a lease of a
day would stay for a day.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.core.attempt import AttemptId


@dataclass(slots=True)
class Lease:
    """A worker's right to one attempt.

    Attributes:
        attempt_id: of the attempt.
        worker: its holder.
        timeout_s: seconds without a heartbeat after which it expires.
        seen_s: when the last heartbeat was seen, on the caller's clock.
        partition: the heartbeats partition of its worker.
        max_attempts: attempts, the first included, that the stage may have; None is its type's
            limit.
        begun: whether its handler has begun, by its worker's last record; None for a restored
            lease.
        slot: of the wheel, set by it.
    """

    attempt_id: AttemptId
    worker: str
    timeout_s: float
    seen_s: float
    partition: int
    max_attempts: int | None = None
    begun: bool | None = None
    slot: int | None = field(default=None, compare=False, repr=False)

    @property
    def deadline_s(self) -> float:
        """When it expires without another heartbeat."""
        return self.seen_s + self.timeout_s


class LeaseWheel:
    """All live leases of one processor.

    Args:
        tick_s: width of a slot in seconds: an expiry is noticed at most this late.

    Attributes:
        overdue_s: seconds since the earliest deadline of a lease that waits for the watermark, at
            the last check; 0 when none waits.
    """

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._leases: dict[AttemptId, Lease] = {}
        self._slots: dict[int, dict[AttemptId, Lease]] = {}
        self._next_slot: int | None = None
        self.overdue_s = 0.0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, attempt_id: AttemptId) -> Lease | None:
        """The lease on this attempt, if there is one."""
        return self._leases.get(attempt_id)

    def holders(self) -> set[str]:
        """Every worker that holds a lease."""
        return {lease.worker for lease in self._leases.values()}

    def grant(self, lease: Lease) -> None:
        """Begins a lease, or replaces the one there was on the same attempt."""
        self._remove(lease.attempt_id)
        self._leases[lease.attempt_id] = lease
        self._file(lease)

    def beat(self, attempt_id: AttemptId, worker: str, now_s: float, *, begun: bool = True) -> bool:
        """Stores a heartbeat, and whether the handler has begun; False without such a lease."""
        lease = self._leases.get(attempt_id)
        if lease is None or lease.worker != worker:
            return False
        lease.seen_s = max(lease.seen_s, now_s)
        lease.begun = begun
        return True

    def end(self, attempt_id: AttemptId, worker: str) -> bool:
        """Ends a lease; False when this worker holds no such lease."""
        lease = self._leases.get(attempt_id)
        if lease is None or lease.worker != worker:
            return False
        self._remove(attempt_id)
        return True

    def drop(self, partitions: frozenset[int]) -> int:
        """Drops the leases of partitions that another processor has now; returns how many."""
        dropped = [attempt_id for attempt_id, lease in self._leases.items() if lease.partition in partitions]
        for attempt_id in dropped:
            self._remove(attempt_id)
        return len(dropped)

    def expired(self, now_s: float, read_until_s: Mapping[int, float] | None = None) -> list[Lease]:
        """Takes out and returns the expired leases, oldest deadline first.

        Args:
            now_s: seconds on the caller's clock.
            read_until_s: by partition, until when all heartbeats and results were read. A lease
                with a later deadline stays: a heartbeat or its result may not be read yet. No lease
                of a partition that is missing expires. None: all were read.
        """
        current = math.floor(now_s / self._tick_s)
        due = [slot for slot in self._slots if slot < current]
        self._next_slot = current
        self.overdue_s = 0.0
        found: list[Lease] = []
        for slot in sorted(due):
            for lease in self._slots.pop(slot).values():
                known_s = now_s if read_until_s is None else read_until_s.get(lease.partition, -math.inf)
                if lease.deadline_s <= min(now_s, known_s):
                    del self._leases[lease.attempt_id]
                    found.append(lease)
                else:
                    self._file(lease)
                    self.overdue_s = max(self.overdue_s, now_s - lease.deadline_s)
        found.sort(key=lambda lease: lease.deadline_s)
        return found

    def _file(self, lease: Lease) -> None:
        slot = math.floor(lease.deadline_s / self._tick_s)
        if self._next_slot is not None:
            # Never in a slot that has passed: it would not be checked again.
            slot = max(slot, self._next_slot)
        lease.slot = slot
        self._slots.setdefault(slot, {})[lease.attempt_id] = lease

    def _remove(self, attempt_id: AttemptId) -> None:
        lease = self._leases.pop(attempt_id, None)
        if lease is None or lease.slot is None:
            return
        slot = self._slots[lease.slot]
        del slot[attempt_id]
        if not slot:
            del self._slots[lease.slot]
