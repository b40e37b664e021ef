"""Decodes records of callbacks, and keeps the callbacks whose target is not in memory yet.

Guarantees: a callback that breaks its contract is rejected alone. A record is received only while
this process owns its partition. A record may carry several callbacks; it is acknowledged when all
of them are settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.callbacks.settings import MAX_WAITING
from penstock.callbacks.target import Target
from penstock.callbacks.target_cache import TargetCache
from penstock.contracts.event import Callback
from penstock.contracts.inbound import decode_callbacks
from penstock.core.target import TargetId
from penstock.kafka.processing.processor import Delivery

# After so many callbacks the event loop runs other tasks. A burst would otherwise delay the calls
# under way, and their durations decide how many callbacks may wait for a target.
YIELD_EVERY = 50


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


class Receiver:
    """Receives records.

    Args:
        cache: has the partitions of this process.

    Attributes:
        closed: whether the service stops: received callbacks are then returned to PostgreSQL.
    """

    def __init__(self, cache: TargetCache) -> None:
        self._cache = cache
        # Callbacks that wait for their target to be loaded, by target, and their total.
        self._waiting: dict[TargetId, list[InFlight]] = {}
        self._count = 0
        self._has_room = asyncio.Event()
        self._since_yield = 0
        self.closed = False

    def has(self, target_id: TargetId) -> bool:
        """Whether callbacks wait for this target to be loaded."""
        return target_id in self._waiting

    async def receive(self, delivery: Delivery) -> list[InFlight]:
        """Decodes a record; waits while too many callbacks wait for their targets to be loaded.

        Returns:
            Its callbacks; empty when there are none or another process owns the partition now.

        Raises:
            InvalidRecord: the record as a whole breaks its contract.
            KafkaUnavailable: an invalid part was not rejected, and nothing was received.
        """
        callbacks, faults = decode_callbacks(delivery.value)
        if faults:
            await delivery.reject_parts(faults)
        if not callbacks:
            delivery.settle()
            return []
        self._since_yield += len(callbacks)
        if self._since_yield >= YIELD_EVERY:
            self._since_yield = 0
            await asyncio.sleep(0)
        while self._count >= MAX_WAITING and not self.closed:
            self._has_room.clear()
            await self._has_room.wait()
        if not self._cache.owns(delivery.partition):
            # While this record waited, its partition moved to another process, which reads it
            # again.
            return []
        parts = _split(delivery, len(callbacks))
        return [InFlight(callback, part) for callback, part in zip(callbacks, parts, strict=True)]

    def wait_for_target(self, in_flight: InFlight) -> bool:
        """Keeps a callback until `resolve`; returns whether it is the first one of its target."""
        waiting = self._waiting.setdefault(in_flight.callback.target, [])
        waiting.append(in_flight)
        self._count += 1
        return len(waiting) == 1

    def resolve(self, target_ids: Iterable[TargetId]) -> list[tuple[InFlight, Target]]:
        """Takes out the callbacks that waited for these targets, which have been loaded.

        A target that is missing belongs to another process now. That process reads its records
        again, so this one drops them.
        """
        resolved: list[tuple[InFlight, Target]] = []
        for target_id in target_ids:
            waiting = self._waiting.pop(target_id, [])
            if (target := self._cache.get(target_id)) is not None:
                resolved += [(in_flight, target) for in_flight in waiting]
        self._recount()
        return resolved

    def revoke(self, partitions: frozenset[int]) -> None:
        """Drops the callbacks of partitions that another process may own now."""
        self._waiting = {
            target_id: left
            for target_id, waiting in self._waiting.items()
            if (left := [in_flight for in_flight in waiting if in_flight.record.partition not in partitions])
        }
        self._recount()

    def close(self) -> list[InFlight]:
        """Stops waiting for targets; returns the callbacks that waited."""
        self.closed = True
        left = [in_flight for waiting in self._waiting.values() for in_flight in waiting]
        self._waiting = {}
        self._recount()
        return left

    def _recount(self) -> None:
        self._count = sum(map(len, self._waiting.values()))
        self._has_room.set()


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


def _split(record: Record, count: int) -> list[Record]:
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
