"""The handler of submissions: a record of Kafka on the steps of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import asyncpg

from penstock import tracing
from penstock.kafka.topology.topics import Topic
from penstock.postgres.ingest_positions import OffsetRange
from penstock.submission import SubmissionKind
from penstock.submission.kind import traced

T = TypeVar("T")
R = TypeVar("R")


class SubmissionReader(Generic[T]):
    """Reads the records of a batch.

    Args:
        kind: of the batch.
    """

    def __init__(self, kind: SubmissionKind[Any, T, Any]) -> None:
        self._kind = kind

    async def read(self, record: Any) -> T:
        """See `RecordReader.read`."""
        item = await self._kind.read(record.value or b"")
        return await self._kind.store(traced(item, self._traceparent(record, item)))

    def _traceparent(self, record: Any, item: T) -> str | None:
        """The span of a submission, in the trace of its record's header or in a new one."""
        if self._kind.span_attribute is None or not tracing.is_on():
            return None
        header = dict(record.headers).get(tracing.TRACEPARENT)
        parent = header.decode("ascii", "replace") if header else None
        attributes = {self._kind.span_attribute: self._kind.name_of(item)}
        with tracing.span("submit", parent, kind="consumer", root=True, **attributes) as span:
            return span.traceparent if span else None


class SubmissionHandler(Generic[T, R]):
    """Handles the records of a topic of submissions (`RecordHandler`).

    Args:
        topic: of the records.
        rejected_topic: for those that break their contract.
        pool: of the database.
        kind: of the submissions.
    """

    def __init__(
        self,
        topic: Topic,
        rejected_topic: Topic,
        pool: asyncpg.Pool[asyncpg.Record],
        kind: SubmissionKind[Any, T, R],
    ) -> None:
        self.topic = topic
        self.rejected_topic = rejected_topic
        self._pool = pool
        self._kind = kind

    def open_batch(self) -> SubmissionReader[T]:
        """See `RecordHandler.open_batch`."""
        return SubmissionReader(self._kind.open_batch())

    async def insert(self, items: Sequence[T], source: OffsetRange) -> None:
        """See `RecordHandler.insert`."""
        await self._kind.insert(self._pool, items, source)
