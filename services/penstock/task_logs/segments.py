"""Segments from records (`penstock.ingest.RecordHandler`): object first, then the row."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg

from penstock.contracts.inbound_logs import logs_of
from penstock.contracts.task_log import encode_chunk
from penstock.core.log_chunk import Chunk, without_repetitions
from penstock.core.log_segment import Segment, encode
from penstock.core.report_tokens import ReportTokens
from penstock.errors import ObjectsUnavailable, SessionLost
from penstock.kafka.topology.topics import TASK_LOGS, TASK_LOGS_REJECTED
from penstock.objects import ObjectStore
from penstock.postgres import task_logs
from penstock.postgres.ingest_positions import OffsetRange

log = logging.getLogger(__name__)

# The folder of segments in the object store; below it is one for each day.
PREFIX = "task-logs"


@dataclass(frozen=True, slots=True)
class Chunks:
    """What a record brought.

    Attributes:
        chunks: its chunks.
        timestamp_ms: of the record, in milliseconds since 1970.
    """

    chunks: Sequence[Chunk]
    timestamp_ms: int


class SegmentHandler:
    """Handles the records of the topic `task-logs`: a batch becomes a segment.

    Args:
        pool: of the database.
        objects: the object store.
        partitions: of the topic.
        tokens: that records must have.

    Attributes:
        segments, lines, raw_bytes, stored_bytes: what this process has stored.
    """

    topic = TASK_LOGS
    rejected_topic = TASK_LOGS_REJECTED

    def __init__(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        objects: ObjectStore,
        partitions: int,
        tokens: ReportTokens,
    ) -> None:
        self._pool = pool
        self._objects = objects
        self._partitions = partitions
        self._tokens = tokens
        self.segments = self.lines = self.raw_bytes = self.stored_bytes = 0

    def open_batch(self) -> SegmentHandler:
        """Itself: records need no look-up."""
        return self

    async def read(self, record: Any) -> Chunks:
        """See `RecordReader.read`."""
        return Chunks(logs_of(record, self._tokens), record.timestamp)

    async def insert(self, items: Sequence[Chunks], source: OffsetRange) -> None:
        """See `RecordHandler.insert`."""
        if not any(record.chunks for record in items):
            await task_logs.insert(self._pool, source, None, None, self._partitions)
            return
        # On a thread: compression would delay the other partitions.
        segment = await asyncio.to_thread(_encoded, items)
        object_key = _object_key(source)
        await self._objects.put(object_key, segment.data)
        try:
            await task_logs.insert(self._pool, source, object_key, segment, self._partitions)
        except SessionLost:
            await self._delete(object_key)
            raise
        self.segments += 1
        self.lines += segment.lines
        self.raw_bytes += segment.raw_bytes
        self.stored_bytes += len(segment.data)

    async def _delete(self, object_key: str) -> None:
        try:
            await self._objects.delete([object_key])
        except ObjectsUnavailable as error:
            # The sweep deletes it.
            log.info(
                "The object of a segment that another process has stored is left for the sweep",
                extra={"event": "log_object_left", "object": object_key, "error": error},
            )


def _encoded(records: Sequence[Chunks]) -> Segment:
    chunks = [chunk for record in records for chunk in record.chunks]
    return encode(without_repetitions(chunks), encode_chunk, [record.timestamp_ms for record in records])


def _object_key(source: OffsetRange) -> str:
    """A key of its own for each attempt: a process that lost its partition overwrites nothing."""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{PREFIX}/{day}/{source.partition}-{source.first}-{secrets.token_hex(6)}.gz"
