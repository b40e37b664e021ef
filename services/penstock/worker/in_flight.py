"""The attempts that a worker has in flight, and the room that its pullers share."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId
from penstock.worker.held_tokens import HeldTokens


@dataclass(slots=True)
class Reservation:
    """Room for attempts of one type that a puller may claim.

    Attributes:
        type_name: the type.
        size: how many more attempts it has room for; 0 when there was no room in time.
    """

    type_name: str
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    reservation: Reservation
    most: int
    granted: asyncio.Future[None]


class InFlight:
    """Every attempt that a worker has taken and whose result is not on Kafka yet.

    A puller reserves room before it takes records. So all pullers together never exceed the
    capacity. Room that becomes free goes to the waiting type that has the least, so that a type
    with much work does not starve the others.

    Args:
        capacity: most attempts in flight that have a handler.
        limit: how many more attempts can be kept alive (`HeartbeatSender.room`).
        types: how many types share the room.
        backlog: how many attempts may wait for a handler now.
        tokens: gets the tokens of attempts; who ends an attempt drops its token.
    """

    def __init__(
        self,
        capacity: int,
        limit: Callable[[], float] = lambda: math.inf,
        types: int = 1,
        backlog: Callable[[], int] = lambda: 0,
        tokens: HeldTokens | None = None,
    ) -> None:
        self._capacity = capacity
        self._blocked = False
        self._limit = limit
        self._backlog = backlog
        self._tokens = tokens if tokens is not None else HeldTokens()
        self.types = types
        self._attempts: dict[AttemptId, str] = {}
        self._reserved = 0
        # By type, attempts in flight and reserved room.
        self._held: Counter[str] = Counter()
        # Attempts that take no room, and how many by type.
        self._parked: set[AttemptId] = set()
        self._parked_of: Counter[str] = Counter()
        # In order of arrival.
        self._waiters: list[_Waiter] = []
        self._removed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[AttemptId]:
        return iter(self._attempts)

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._attempts

    @property
    def room(self) -> int:
        """How many more attempts may be reserved."""
        if self._blocked:
            return 0
        with_handler = len(self._attempts) - len(self._parked)
        return int(min(self._capacity + self._backlog() - with_handler, self._limit())) - self._reserved

    @property
    def is_ample(self) -> bool:
        """Whether each type may keep room for an attempt while it waits for its next task."""
        return self.room >= self.types

    def block(self, blocked: bool) -> None:
        """Sets whether there is no room, however few attempts are in flight."""
        self._blocked = blocked
        self._grant()

    def type_of(self, attempt_id: AttemptId) -> str | None:
        """The type of an attempt; None when it is not in flight."""
        return self._attempts.get(attempt_id)

    @property
    def by_type(self) -> Counter[str]:
        """How many attempts of each type are in flight."""
        return Counter(self._attempts.values())

    def first(self, most: int) -> list[tuple[AttemptId, str]]:
        """Attempts in flight with their types, those that were taken first; at most so many."""
        return list(islice(self._attempts.items(), most))

    def park(self, attempt_id: AttemptId) -> None:
        """Frees the room of an attempt whose handler has ended and whose result waits.

        A type with `capacity` such attempts gets no room until some of them are removed. Otherwise
        it would take more tasks for as long as an outage lasts.
        """
        type_name = self._attempts.get(attempt_id)
        if type_name is not None and attempt_id not in self._parked:
            self._parked.add(attempt_id)
            self._parked_of[type_name] += 1
            self._grant()

    @asynccontextmanager
    async def reserve(self, type_name: str, most: int, timeout_s: float) -> AsyncIterator[Reservation]:
        """Room for a type for the time of a `with` block; what is not used is free afterwards.

        Args:
            type_name: the type.
            most: most attempts.
            timeout_s: seconds to wait for room; after that the reservation has size 0.
        """
        reservation = Reservation(type_name, 0)
        waiter = _Waiter(reservation, most, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            if not waiter.granted.done():
                await asyncio.wait({waiter.granted}, timeout=timeout_s)
            if not waiter.granted.done():
                self._waiters.remove(waiter)
            yield reservation
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._free(reservation, reservation.size)
            self._grant()

    def add(self, claimed: Iterable[ReadyTask], reservation: Reservation | None = None) -> None:
        """Adds claimed attempts, which use up the room that was reserved for them."""
        before = len(self._attempts)
        for ready in claimed:
            if ready.attempt_id not in self._attempts:
                self._attempts[ready.attempt_id] = ready.type
                self._held[ready.type] += 1
                self._tokens.add(ready)
        if reservation is not None:
            self._free(reservation, min(reservation.size, len(self._attempts) - before))

    def remove(self, attempt_ids: Iterable[AttemptId]) -> None:
        """Removes attempts whose results are on Kafka, or that this worker has lost."""
        for attempt_id in attempt_ids:
            type_name = self._attempts.pop(attempt_id, None)
            if type_name is not None:
                self._release(type_name, 1)
                if attempt_id in self._parked:
                    self._parked.remove(attempt_id)
                    self._parked_of[type_name] -= 1
        self._removed.set()
        self._grant()

    async def wait_gone(self, attempt_ids: Iterable[AttemptId]) -> None:
        """Waits until none of these attempts is in flight."""
        waited_for = list(attempt_ids)
        while any(attempt_id in self._attempts for attempt_id in waited_for):
            self._removed.clear()
            await self._removed.wait()

    def _grant(self) -> None:
        waiters = [
            waiter
            for waiter in self._waiters
            if self._parked_of[waiter.reservation.type_name] < self._capacity
        ]
        while waiters and (room := self.room) > 0:
            # The first of those that have the least.
            waiter = min(waiters, key=lambda waiter: self._held[waiter.reservation.type_name])
            size = min(waiter.most, max(1, room // len(waiters)))
            waiters.remove(waiter)
            self._waiters.remove(waiter)
            self._reserved += size
            self._held[waiter.reservation.type_name] += size
            waiter.reservation.size = size
            waiter.granted.set_result(None)

    def _free(self, reservation: Reservation, size: int) -> None:
        reservation.size -= size
        self._reserved -= size
        self._release(reservation.type_name, size)

    def _release(self, type_name: str, size: int) -> None:
        self._held[type_name] -= size
        if self._held[type_name] <= 0:
            del self._held[type_name]
