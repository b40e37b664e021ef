"""Records in hand: one may carry many callbacks, and is acknowledged when all of them are settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.contracts.event import Callback


class Record(Protocol):
    """What a lane needs of the record in hand."""

    @property
    def topic(self) -> str:
        """Its bare name."""

    @property
    def partition(self) -> int:
        """Of its topic."""

    def settle(self) -> None:
        """Its effects are durable, or another's."""


@dataclass(slots=True)
class Waiting:
    """A callback in hand, with its record.

    Attributes:
        callback: as its record says.
        record: to be settled.
        spent: attempts that its schedule does not count, because it was replayed since, or because this service suspected
            itself; known once begun.
        came_s: when it came into its lane, on the loop's clock.
        begun_s: when its attempt had been written down, likewise.
    """

    callback: Callback
    record: Record
    spent: int = 0
    came_s: float = 0.0
    begun_s: float = 0.0


class Part:
    """One callback's part of a record.

    Args:
        record: with others in it.
        settled: told, once, that this part is.
    """

    __slots__ = ("_settled", "partition", "topic")

    def __init__(self, record: Record, settled: Callable[[], None]) -> None:
        self.topic = record.topic
        self.partition = record.partition
        self._settled: Callable[[], None] | None = settled

    def settle(self) -> None:
        """Any number of times; the first one counts."""
        if self._settled is not None:
            settled, self._settled = self._settled, None
            settled()


def parts_of(record: Record, count: int) -> list[Record]:
    """As many records as there are callbacks in one, which is settled when all of them are."""
    if count == 1:
        return [record]
    left = count

    def settled() -> None:
        nonlocal left
        left -= 1
        if not left:
            record.settle()

    return [Part(record, settled) for _ in range(count)]
