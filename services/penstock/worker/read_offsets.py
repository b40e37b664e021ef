"""The offsets that a worker has read, and those that it may commit.

An offset is committed only when the result or the claim of every attempt before it is on Kafka.
When in doubt a record counts as unsettled: it is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from contextlib import suppress

from aiokafka import TopicPartition

from penstock.core.attempt import AttemptId
from penstock.core.early_start import COMMIT_EVERY_S, COMMIT_RECORDS
from penstock.core.offset_tracker import CommittableOffsets, PartitionOffsets


class ReadOffsets(CommittableOffsets):
    """The offsets of the partitions that a consumer has now.

    Args:
        unclaimed: the attempts of which neither the result nor the claim is on Kafka.
    """

    def __init__(self, unclaimed: Container[AttemptId]) -> None:
        super().__init__()
        self._unclaimed = unclaimed
        # The records of attempts that are not settled. A record may be read twice.
        self._records: dict[AttemptId, list[tuple[TopicPartition, int]]] = {}
        self._added = asyncio.Event()
        self._many = asyncio.Event()
        self._count = 0

    @property
    def unsettled(self) -> list[AttemptId]:
        """The attempts that keep offsets from being committed."""
        return list(self._records)

    def add(self, partition: TopicPartition, offset: int, attempt_id: AttemptId | None) -> None:
        """Adds a record in the order of its partition; one without an attempt is settled."""
        offsets = self._partitions.get(partition)
        if offsets is None:
            offsets = self._partitions[partition] = PartitionOffsets(offset)
            self._committed[partition] = offset
        # Deleted records, and markers of transactions, leave gaps.
        offsets.skip_to(offset)
        offsets.arrive(offset)
        if attempt_id is not None and attempt_id in self._unclaimed:
            self._records.setdefault(attempt_id, []).append((partition, offset))
        else:
            offsets.settle(offset)
        self._count += 1
        self._added.set()
        if self._count >= COMMIT_RECORDS:
            self._many.set()

    def clear(self) -> None:
        """Forgets all partitions: they are read again from their committed offsets."""
        self._partitions.clear()
        self._committed.clear()
        self._records.clear()
        self._count = 0

    def committable(self) -> dict[TopicPartition, int]:
        """The offsets to commit: those that have moved since the last commit."""
        for attempt_id in [one for one in self._records if one not in self._unclaimed]:
            for partition, offset in self._records.pop(attempt_id):
                self._partitions[partition].settle(offset)
        return super().committable()

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Stores offsets that Kafka has; those of partitions that were cleared change nothing."""
        super().committed(offsets)
        self._count = 0
        self._many.clear()

    async def wait_due(self) -> None:
        """Waits until records were read, and then until the next commit is due."""
        if not self._records and not self.committable():
            self._added.clear()
            await self._added.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_EVERY_S):
                await self._many.wait()
        self._many.clear()
        self._count = 0
