"""The chunks of a task's log: from segments, and from there to the end of the topic.

The two meet at the offset that PostgreSQL has with the segments, in one snapshot.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

import asyncpg

from penstock.core.log_chunk import Chunk, RunId
from penstock.core.log_view import RunSummary, add_summaries, summarize
from penstock.errors import KafkaUnavailable
from penstock.gateway.log_attempts import window
from penstock.gateway.log_segments import SegmentReader
from penstock.gateway.log_tail import FellBehind, LogTail
from penstock.kafka.topology.topics import TASK_LOGS
from penstock.objects import ObjectStore
from penstock.postgres import task_logs
from penstock.settings import Kafka

# Seconds for the lines that are on the topic to be read.
TAIL_S = 10.0

# Totals of a task in one segment that are in memory: a follower and a console ask again and again.
_SUMMARIES = 2_000

Attempt = tuple[int, int]


class LogSource:
    """Finds and reads the chunks of logs.

    Args:
        settings: where Kafka is.
        pool: the database.
        objects: has the segments.
        tail: reads the topic.
    """

    def __init__(
        self, settings: Kafka, pool: asyncpg.Pool[asyncpg.Record], objects: ObjectStore, tail: LogTail
    ) -> None:
        self._topic = settings.prefix + TASK_LOGS.name
        self._pool = pool
        self._segments = SegmentReader(objects)
        self._summaries: OrderedDict[tuple[str, int], list[RunSummary]] = OrderedDict()
        self.tail = tail

    async def find(
        self, row: Mapping[str, Any], attempt: Attempt | None, since_ms: int = 0
    ) -> task_logs.StoredLog:
        """Finds what is stored of the log of a task, or of one of its attempts, since a moment.

        Raises:
            KafkaUnavailable, PostgresUnavailable: no server.
        """
        begin, end = window(row, attempt, since_ms)
        partitions = await self.tail.partitions()
        return await task_logs.find(self._pool, row["id"], begin, end, self._topic, partitions)

    async def stored(
        self,
        row: Mapping[str, Any],
        attempt: Attempt | None,
        log: task_logs.StoredLog,
        first: int = 0,
        last: int = 0,
    ) -> AsyncIterator[Chunk]:
        """The chunks that are in segments, from line `first` on; blocks before it are not read.

        With `last`, neither are those before the last so many lines.

        Raises:
            CorruptObject: a segment is damaged, or missing.
            ObjectsUnavailable: the store does not answer.
        """
        async for chunk in self._segments.chunks(log.segments, row["id"], attempt, first=first, last=last):
            if is_wanted(chunk, row["id"], attempt):
                yield chunk

    async def chunks(
        self,
        row: Mapping[str, Any],
        attempt: Attempt | None,
        first: int = 0,
        last: int = 0,
        since_ms: int = 0,
    ) -> AsyncIterator[Chunk]:
        """The chunks that there are now.

        Those of lines before `first`, the `last` lines, or the moment `since_ms` may be missing.

        Raises:
            CorruptObject: as `stored`.
            Unavailable: a server does not answer.
        """
        log = await self.find(row, attempt, since_ms)
        async for chunk in self.stored(row, attempt, log, first, last):
            yield chunk
        async for chunk in self._newest(row, attempt, log):
            yield chunk

    async def summaries(self, row: Mapping[str, Any]) -> dict[RunId, RunSummary]:
        """The totals of all runs of a task. The lines of a segment are read once for many answers.

        Raises:
            CorruptObject: as `stored`.
            Unavailable: a server does not answer.
        """
        log = await self.find(row, None)
        found: dict[RunId, RunSummary] = {}
        for segment in log.segments:
            if not add_summaries(found, await self._summaries_of(segment, row["id"])):
                await self._summarize(found, segment, row["id"])
        async for chunk in self._newest(row, None, log):
            summarize(found, chunk)
        return found

    async def _summaries_of(self, segment: task_logs.StoredSegment, task_id: int) -> list[RunSummary]:
        place = segment.object_key, task_id
        known = self._summaries.get(place)
        if known is None:
            found: dict[RunId, RunSummary] = {}
            await self._summarize(found, segment, task_id)
            known = self._summaries[place] = list(found.values())
            if len(self._summaries) > _SUMMARIES:
                self._summaries.popitem(last=False)
        self._summaries.move_to_end(place)
        return known

    async def _summarize(
        self, found: dict[RunId, RunSummary], segment: task_logs.StoredSegment, task_id: int
    ) -> None:
        async for chunk in self._segments.chunks([segment], task_id):
            summarize(found, chunk)

    async def _newest(
        self, row: Mapping[str, Any], attempt: Attempt | None, log: task_logs.StoredLog
    ) -> AsyncIterator[Chunk]:
        """The chunks that are only on the topic."""
        task_id = row["id"]
        async with self.tail.reading(task_id, log.next_offset) as reader:
            end = await self.tail.end(reader.number)
            deadline_s = asyncio.get_running_loop().time() + TAIL_S
            while True:
                try:
                    for chunk in reader.take():
                        if is_wanted(chunk, task_id, attempt):
                            yield chunk
                except FellBehind:
                    raise KafkaUnavailable(
                        "new lines came faster than this answer was read; read the log again"
                    ) from None
                if reader.offset >= end:
                    return
                if asyncio.get_running_loop().time() > deadline_s:
                    raise KafkaUnavailable("the newest lines could not be read in time")
                await reader.wait(1.0)


def is_wanted(chunk: Chunk, task_id: int, attempt: Attempt | None) -> bool:
    """Whether a chunk is of a task, and of the attempt if one is given."""
    if chunk.run.task_id != task_id:
        return False
    return attempt is None or (chunk.run.step, chunk.run.attempt) == attempt
