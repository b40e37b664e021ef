"""Checks the committed positions of a consumer group's member before it reads from them.

Where each reader of a group starts:

- a valid position: there;
- no position: at the beginning. A group is new, or it had no members for longer than its offsets
  are retained; ready topics retain records for as long, so what is left was not read;
- a topic that was created again: at the beginning, because all its records are new;
- a log that lost its tail: where it was cut, not at the beginning, because the records before it
  were read: their tasks would run again;
- behind deleted records: at the oldest one that is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from penstock.core.position import Position
from penstock.errors import KafkaUnavailable, SessionLost
from penstock.kafka import positions
from penstock.kafka.connection import translated
from penstock.kafka.fetch_guard import FetchGuard, identify_commits


class GroupPositions(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """The positions of one member; the listener of its consumer.

    Args:
        consumer: of a group, not started. Its `getmany` goes through here from now on.
        listener: called, too.
    """

    def __init__(self, consumer: AIOKafkaConsumer, listener: ConsumerRebalanceListener | None = None) -> None:
        self._consumer = consumer
        self._listener = listener
        self._guard = FetchGuard(consumer)
        self._getmany = consumer.getmany
        consumer.getmany = self._fetch
        self._checking: asyncio.Task[None] | None = None
        self._checked = False
        self._identified = False
        self._moved: dict[TopicPartition, int] = {}

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Other members may read the partitions now."""
        self._checked = False
        self._moved = {}
        self._guard.forget()
        if self._listener is not None:
            await self._listener.on_partitions_revoked(revoked)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Seeks to the checked positions."""
        # In a task, because the client swallows exceptions of a listener.
        self._checking = asyncio.create_task(self._check(list(assigned)))
        await asyncio.wait({self._checking})
        if self._listener is not None:
            await self._listener.on_partitions_assigned(assigned)

    async def _fetch(
        self, *, timeout_ms: int, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        """As the consumer's `getmany`, and nothing from positions that are not checked.

        Raises:
            KafkaUnavailable: a position could not be checked, or a log was replaced; another
                consumer starts from where it fits.
            SessionLost: the partitions moved.
        """
        with translated():
            fetched: dict[TopicPartition, list[Any]] = await self._getmany(
                timeout_ms=timeout_ms, max_records=max_records
            )
        if self._checking is not None and self._checking.done():
            self._checking.result()
        try:
            self._guard.ensure()
        except SessionLost as error:
            raise KafkaUnavailable(str(error)) from error
        if not self._checked:
            return {}  # read again after the seek
        if self._moved:
            # At once: the old offset is beyond the end, and looks as if all records were read.
            moved, self._moved = self._moved, {}
            with translated():
                await self._consumer.commit(moved)
        return fetched

    async def _check(self, assigned: list[TopicPartition]) -> None:
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
        positions.report(starts)
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
