"""Finds the task that kills its workers, among those that only ran beside it.

A lost worker names no culprit. So the platform charges the loss to the attempts that had begun, and
each of them becomes a suspect. A worker runs suspects one at a time, and its next loss is charged
to the suspect that had begun, and to no attempt beside it. Before the loss that would quarantine
its task, a suspect runs alone, so that no other attempt can cause that loss.

Guarantees
- No task is quarantined for the loss of a worker on which it did not run alone, unless its type
  allows a single loss.
- Every loss with a begun attempt is charged to at least one attempt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Isolation(StrEnum):
    """How a worker runs a suspect: `ONE` at a time beside other attempts, or `ALONE`."""

    ONE = "one"
    ALONE = "alone"


def isolation_of(losses: int, max_losses: int) -> Isolation | None:
    """How the next attempt of a stage runs.

    Args:
        losses: that its stage was charged with.
        max_losses: the number that quarantines its task.
    """
    if losses == 0:
        return None
    return Isolation.ALONE if losses >= max_losses - 1 else Isolation.ONE


class LostAttempt(NamedTuple, Generic[K]):
    """An attempt in flight on a worker that was lost.

    Attributes:
        key: of the attempt.
        losses: that its stage was charged with before.
        begun: whether its handler had begun; None when that is unknown.
    """

    key: K
    losses: int
    begun: bool | None


def suspects_of(attempts: Collection[LostAttempt[K]]) -> set[K]:
    """The suspects that had begun on a worker."""
    return {one.key for one in attempts if one.losses and one.begun}


def charged(attempts: Collection[LostAttempt[K]], *, suspects_charged: bool = False) -> set[K]:
    """The attempts that are charged with the loss of their worker.

    When in doubt whether a suspect had begun it is not charged: it is suspected already.

    Args:
        attempts: all attempts of the worker.
        suspects_charged: whether a begun suspect was charged with this loss before.
    """
    if suspects := suspects_of(attempts):
        return suspects
    if suspects_charged:
        return set()
    return {one.key for one in attempts if not one.losses and one.begun is not False}


class SuspectQueue(Generic[K]):
    """Decides when suspects begin in one process, and when other attempts must wait.

    One suspect has its turn at a time. Each suspect that outlives its turn lets one more have a
    turn beside the next, so that their number doubles while all run for long. It is one again after
    a suspect has ended within its turn.

    A suspect that runs alone has been lost more often than the others, and begins after them. So
    tasks that only ran beside it end before it can kill one more worker on which they wait.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[K, Isolation]] = deque()
        self._turns: dict[K, Isolation] = {}
        # Suspects that may have a turn at once.
        self._most = 1

    def __len__(self) -> int:
        """How many suspects wait."""
        return len(self._waiting)

    def add(self, key: K, isolation: Isolation) -> None:
        """Adds a suspect; those that run alone wait behind all others."""
        place = len(self._waiting)
        if isolation is not Isolation.ALONE:
            place = sum(other is not Isolation.ALONE for _key, other in self._waiting)
        self._waiting.insert(place, (key, isolation))

    @property
    def blocks_others(self) -> bool:
        """Whether no other attempt may begin: a suspect runs alone, or is the next to do so."""
        if self._turns:
            return Isolation.ALONE in self._turns.values()
        return bool(self._waiting) and self._waiting[0][1] is Isolation.ALONE

    def behind_alone(self) -> list[K]:
        """The suspects that wait while one runs alone, or is the next to do so."""
        first = 0 if Isolation.ALONE in self._turns.values() else 1
        return [key for key, _isolation in self._waiting][first:] if self.blocks_others else []

    def take(self, running: int, may_begin: Callable[[K], bool] = lambda _key: True) -> K | None:
        """Removes and returns a suspect that begins now, if any.

        Args:
            running: how many attempts run in this process.
            may_begin: whether a suspect may begin otherwise; those behind it wait until it may.
        """
        if not self._waiting or len(self._turns) >= self._most:
            return None
        key, isolation = self._waiting[0]
        if self._turns and Isolation.ALONE in (isolation, *self._turns.values()):
            return None
        if (isolation is Isolation.ALONE and running) or not may_begin(key):
            return None
        self._waiting.popleft()
        self._turns[key] = isolation
        return key

    def end_turn(self, key: K, *, outlived: bool = False) -> None:
        """Ends the turn of a suspect, if it has one.

        Args:
            key: of the suspect.
            outlived: whether it still runs.
        """
        if self._turns.pop(key, None) is not None:
            self._most = self._most + 1 if outlived else 1

    def drop(self, keys: Collection[K]) -> None:
        """Removes suspects, also those that have a turn."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in keys)
        for key in keys:
            self._turns.pop(key, None)
