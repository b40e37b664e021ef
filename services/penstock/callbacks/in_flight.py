"""Callbacks in flight.

A Kafka record may carry several callbacks; it is acknowledged when all of them are settled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.contracts.event import Callback


class Record(Protocol):
    """The Kafka record of a callback, or the callback's part of it."""

    @property
    def topic(self) -> str:
        """Its topic without the deployment's prefix."""

    @property
    def partition(self) -> int:
        """The partition of its topic."""

    def settle(self) -> None:
        """PostgreSQL holds its state, so that the record can be acknowledged."""


# Not frozen: the pipeline fills in the fields as the callback moves on.
@dataclass(slots=True)
class InFlight:
    """A callback that this process has received and not finished.

    Attributes:
        callback: the record's content.
        record: settled once PostgreSQL holds the callback's state.
        uncounted: attempts that the retry schedule does not count, from before a replay or from
            self-check mode; known once claimed.
        queued_at_s: when it entered its lane, on the loop's clock.
        claimed_at_s: when its attempt was recorded, on the loop's clock.
    """

    callback: Callback
    record: Record
    uncounted: int = 0
    queued_at_s: float = 0.0
    claimed_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A callback that leaves this process without a call and waits in PostgreSQL.

    Attributes:
        in_flight: the callback.
        due_in_s: seconds until its record is published again; None holds it until its target may be
            called.
        claimed: whether an attempt was recorded. Its number is used up, but the retry schedule does
            not count it.
    """

    in_flight: InFlight
    due_in_s: float | None
    claimed: bool = False

    @property
    def attempt(self) -> tuple[str, int]:
        """Id of the callback, and the attempts recorded so far."""
        callback = self.in_flight.callback
        return callback.id, callback.attempt + self.claimed

    @property
    def uncounted(self) -> int | None:
        """Attempts that the schedule does not count from now on; None for no change."""
        return self.in_flight.uncounted + 1 if self.claimed else None


class _RecordPart:
    """The part of a record that one callback settles.

    Args:
        record: the whole record.
        settle: called once, when this part is settled first.
    """

    __slots__ = ("_settle", "partition", "topic")

    def __init__(self, record: Record, settle: Callable[[], None]) -> None:
        self.topic = record.topic
        self.partition = record.partition
        self._settle: Callable[[], None] | None = settle

    def settle(self) -> None:
        """Idempotent."""
        if self._settle is not None:
            settle, self._settle = self._settle, None
            settle()


def split(record: Record, count: int) -> list[Record]:
    """Splits a record into `count` parts; settling all of them settles the record."""
    if count == 1:
        return [record]
    unsettled = count

    def settle_part() -> None:
        nonlocal unsettled
        unsettled -= 1
        if not unsettled:
            record.settle()

    return [_RecordPart(record, settle_part) for _ in range(count)]
