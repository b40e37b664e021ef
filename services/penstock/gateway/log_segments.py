"""Reads the lines of a task from segments in the object store, block by block."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence

import orjson

from penstock.contracts.task_log import chunk_from_wire
from penstock.core.log_chunk import Chunk, RunId
from penstock.core.log_segment import (
    INDEX_GUESS,
    Block,
    blocks_of,
    decode_index,
    decompressed,
    index_range,
)
from penstock.objects import ObjectStore
from penstock.postgres.task_logs import StoredSegment

# Indexes in memory: a follower, a page and a search of one log read the same ones.
_INDEXES = 500


class SegmentReader:
    """Reads segments.

    Args:
        objects: the object store.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._indexes: OrderedDict[str, list[Block]] = OrderedDict()

    async def chunks(
        self,
        segments: Sequence[StoredSegment],
        task_id: int,
        attempt: tuple[int, int] | None = None,
        *,
        first: int = 0,
        last: int = 0,
    ) -> AsyncIterator[Chunk]:
        """The chunks of a task, in the order of segments; a block is read when it is reached.

        Args:
            segments: that may have some.
            task_id: of the task.
            attempt: blocks of a single run of another attempt are not read; None reads all.
            first: blocks of a single run whose lines are all before this one are not read.
            last: blocks before the last so many lines need not be read; 0 reads all.

        Raises:
            CorruptObject: a segment is damaged, or missing.
            ObjectsUnavailable: the store does not answer.
        """
        if last:
            for segment, block in await self._last(segments, task_id, attempt, last):
                for chunk in await self._read(segment, block, task_id):
                    yield chunk
            return
        for segment in segments:
            for block in await self._blocks(segment, task_id, attempt):
                if block.run is not None and block.following <= first:
                    continue
                for chunk in await self._read(segment, block, task_id):
                    yield chunk

    async def _last(
        self, segments: Sequence[StoredSegment], task_id: int, attempt: tuple[int, int] | None, last: int
    ) -> list[tuple[StoredSegment, Block]]:
        """The last blocks that have so many lines of each run, by the indexes alone."""
        found: list[tuple[StoredSegment, Block]] = []
        # The lowest line so far and the number of lines, by run. A repeated line counts once.
        lowest: dict[RunId, int] = {}
        counts: Counter[RunId] = Counter()
        for segment in reversed(segments):
            for block in reversed(await self._blocks(segment, task_id, attempt)):
                run = block.run
                if run is not None:
                    if counts[run] >= last:
                        continue
                    known = lowest.get(run, block.following)
                    counts[run] += max(0, min(known, block.following) - block.first)
                    lowest[run] = min(known, block.first)
                found.append((segment, block))
        return found[::-1]

    async def _blocks(
        self, segment: StoredSegment, task_id: int, attempt: tuple[int, int] | None
    ) -> list[Block]:
        found = blocks_of(await self._index(segment), task_id)
        if attempt is None:
            return found
        return [
            block for block in found if block.run is None or (block.run.step, block.run.attempt) == attempt
        ]

    async def _read(self, segment: StoredSegment, block: Block, task_id: int) -> list[Chunk]:
        data = await self._objects.range(segment.object_key, block.offset, block.length)
        chunks = (chunk_from_wire(orjson.loads(line)) for line in decompressed(data).splitlines())
        return [chunk for chunk in chunks if chunk.run.task_id == task_id]

    async def _index(self, segment: StoredSegment) -> list[Block]:
        known = self._indexes.get(segment.object_key)
        if known is not None:
            self._indexes.move_to_end(segment.object_key)
            return known
        length = min(segment.size, INDEX_GUESS)
        tail = await self._objects.range(segment.object_key, segment.size - length, length)
        begin, size = index_range(tail, segment.size)
        skipped = segment.size - length
        if begin >= skipped:
            data = tail[begin - skipped : begin - skipped + size]
        else:
            data = await self._objects.range(segment.object_key, begin, size)
        index = decode_index(data)
        self._indexes[segment.object_key] = index
        if len(self._indexes) > _INDEXES:
            self._indexes.popitem(last=False)
        return index
