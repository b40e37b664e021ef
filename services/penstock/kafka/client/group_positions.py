"""Checks the committed positions of a consumer group's member before it reads from them.

Where each reader of a group starts:

- a valid position: there;
- no position: at the beginning. A group is new, or it had no members for longer than its offsets
  are retained; ready topics retain records for as long, so what is left was not read;
- a topic that was created again: at the beginning, because all its records are new;
- a log that lost its tail: where it was cut, not at the beginning, because the records before it
  were read: their tasks would run again;
- behind deleted records: at the oldest one that is left. Task-sync deletes the records of tasks
  that it withdraws from a busy worker, so this is neither reported nor counted.

The check runs beside the group's rebalance. aiokafka sends no heartbeat while a listener runs, and
cannot stop: over a bad link the member would lose its session, or never end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from penstock.core.position import Position, StartReason
from penstock.errors import KafkaUnavailable, SessionLost
from penstock.kafka.client import positions
from penstock.kafka.client.connection import translated
from penstock.kafka.client.fetch_guard import FetchGuard, identify_commits

# Seconds for all requests of a check. Then the reader starts again with new connections: one that
# has lost packets waits longer and longer before it repeats them.
CHECK_S = 10.0


class GroupPositions(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """The positions of one member; the listener of its consumer.

    Args:
        consumer: of a group, not started. Its `getmany` and `stop` go through here from now on.
        listener: called, too.
    """

    def __init__(self, consumer: AIOKafkaConsumer, listener: ConsumerRebalanceListener | None = None) -> None:
        self._consumer = consumer
        self._listener = listener
        self._guard = FetchGuard(consumer, may_be_deleted=True)
        self._getmany = consumer.getmany
        consumer.getmany = self._fetch
        self._stop = consumer.stop
        consumer.stop = self._end
        self._checking: asyncio.Task[None] | None = None
        self._checked = False
        self._identified = False
        self._moved: dict[TopicPartition, int] = {}

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Other members may read the partitions now."""
        await self._cancel_check()
        self._checked = False
        self._moved = {}
        if self._listener is not None:
            await self._listener.on_partitions_revoked(revoked)
        # Last: the listener may commit, with the identity of its positions.
        self._guard.forget()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Begins the check, which seeks to the checked positions."""
        await self._cancel_check()
        # In a task, because the client waits for its listener and swallows exceptions of it.
        self._checking = asyncio.create_task(self._check(list(assigned)))
        if self._listener is not None:
            await self._listener.on_partitions_assigned(assigned)

    async def _cancel_check(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            # Its error belongs to an assignment that is over.
            await asyncio.gather(self._checking, return_exceptions=True)
            self._checking = None

    async def _end(self) -> None:
        # The client looks for no coordinator once it stops, and the check would wait for one.
        await self._cancel_check()
        await self._stop()

    async def _fetch(
        self, *, timeout_ms: int, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        """As the consumer's `getmany`, and nothing from positions that are not checked.

        Raises:
            KafkaUnavailable: a position could not be checked, or a log was replaced; another
                consumer starts from where it fits.
            SessionLost: the partitions moved.
        """
        if not await self.ensure(timeout_ms / 1000):
            return {}
        with translated():
            fetched: dict[TopicPartition, list[Any]] = await self._getmany(
                timeout_ms=timeout_ms, max_records=max_records
            )
        # The partitions may have moved meanwhile. Then the records are read again after the seek.
        return fetched if await self.ensure(0.0) and self._checked else {}

    async def ensure(self, timeout_s: float) -> bool:
        """Whether no check is under way; ends a reader whose logs are not those that it read.

        A reader that waits for records calls it, too: none come from a log that was replaced.

        Args:
            timeout_s: most seconds to wait for the check.

        Raises:
            KafkaUnavailable: as `_fetch`.
            SessionLost: the partitions moved.
        """
        if (checking := self._checking) is not None and not checking.done():
            # At least a moment: a reader with fetched records polls again at once.
            await asyncio.wait({checking}, timeout=max(timeout_s, 0.05))
            if not checking.done():
                return False
        if (checking := self._checking) is not None and checking.done() and not checking.cancelled():
            checking.result()
        try:
            self._guard.ensure()
        except SessionLost as error:
            raise KafkaUnavailable(str(error)) from error
        if not self._checked:
            # The next assignment begins the check.
            return True
        if self._moved:
            # At once: the old offset is beyond the end, and looks as if all records were read.
            moved, self._moved = self._moved, {}
            with translated():
                await self._consumer.commit(moved)
        return True

    async def _check(self, assigned: list[TopicPartition]) -> None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._seek(assigned)
        except TimeoutError as error:
            raise KafkaUnavailable(
                f"Kafka: the positions of {len(assigned)} partitions could not be checked within {CHECK_S:g} s"
            ) from error

    async def _seek(self, assigned: list[TopicPartition]) -> None:
        consumer = self._consumer
        with translated():
            coordinator = consumer._coordinator  # noqa: SLF001 (`committed` drops the metadata)
            committed: Mapping[TopicPartition, OffsetAndMetadata] = await coordinator.fetch_committed_offsets(
                assigned
            )
        stored = {
            tp: Position.from_stored(found.offset, found.metadata) if (found := committed.get(tp)) else None
            for tp in assigned
        }
        starts = await positions.check(consumer, stored)
        positions.report(
            {tp: start for tp, start in starts.items() if start.reason is not StartReason.DELETED}
        )
        if not self._identified:
            identify_commits(consumer, self._guard)
            self._identified = True
        current = consumer.assignment()
        for tp, start in starts.items():
            if tp in current:
                self._guard.start({tp: start.position})
                consumer.seek(tp, start.position.offset)
        self._moved = {tp: start.position.offset for tp, start in starts.items() if start.moved}
        self._checked = True
