"""Reads the lines of a task from segments in the object store, block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

import orjson

from penstock.contracts.task_log import chunk_from_wire
from penstock.core.log_chunk import Chunk
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
        self, segments: Sequence[StoredSegment], task_id: int, *, first: int = 0
    ) -> AsyncIterator[Chunk]:
        """The chunks of a task, in the order of segments; a block is read when it is reached.

        Args:
            segments: that may have some.
            task_id: of the task.
            first: blocks of a single run whose lines are all before this one are not read.

        Raises:
            CorruptObject: a segment is damaged, or missing.
            ObjectsUnavailable: the store does not answer.
        """
        for segment in segments:
            for block in blocks_of(await self._index(segment), task_id):
                if block.run is not None and block.following <= first:
                    continue
                data = await self._objects.range(segment.object_key, block.offset, block.length)
                for line in decompressed(data).splitlines():
                    chunk = chunk_from_wire(orjson.loads(line))
                    if chunk.run.task_id == task_id:
                        yield chunk

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
