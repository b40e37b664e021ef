"""Tasks from records: validates each, stores its context if it is large, and inserts batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import asyncpg

from penstock.contracts.context_digest import with_digest
from penstock.contracts.parsing import parse
from penstock.contracts.submission import Submission
from penstock.core.access import namespace_of
from penstock.errors import InvalidRecord, UnknownType
from penstock.ingest.spans import submission_traceparent
from penstock.kafka.topology.topics import SUBMITTED, SUBMITTED_REJECTED
from penstock.objects import ObjectStore
from penstock.postgres import tasks
from penstock.postgres.connection import translated
from penstock.postgres.ingest_positions import OffsetRange
from penstock.postgres.repeating import transacted
from penstock.postgres.types import TypeCache


class SubmissionHandler:
    """Handles the records of the topic `submitted` (`penstock.ingest.RecordHandler`).

    Args:
        pool: of the database.
        types: the registered types.
        objects: the object store for large contexts.
    """

    topic = SUBMITTED
    rejected_topic = SUBMITTED_REJECTED

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], types: TypeCache, objects: ObjectStore) -> None:
        self._pool = pool
        self._types = types
        self._objects = objects

    def open_batch(self) -> SubmissionHandler:
        """Itself: the cache of types is for all batches."""
        return self

    async def insert(self, submissions: Sequence[Submission], source: OffsetRange) -> None:
        """See `RecordHandler.insert`."""
        if all(submission.context_digest is None for submission in submissions):
            await tasks.submit(self._pool, submissions, source)
            return

        async def insert(connection: Any) -> None:
            for submission, found in zip(
                submissions, await tasks.submit(connection, submissions, source), strict=True
            ):
                if found.differs:
                    # Rolls the batch back: the rejection must be on Kafka before the offset moves.
                    raise found.conflict(submission)

        with translated():
            await transacted(self._pool, insert)

    async def read(self, record: Any) -> Submission:
        """The submission of a record.

        Raises:
            Invalid: the record is none, or its type is not registered.
            ObjectsUnavailable: its context is large, and the store is away.
            PostgresUnavailable: the types could not be read.
        """
        submission = await self._parse(record.value or b"")
        traceparent = submission_traceparent(record, type=submission.type)
        return submission if traceparent is None else dataclasses.replace(submission, traceparent=traceparent)

    async def _parse(self, value: bytes) -> Submission:
        try:
            submission = Submission.from_wire(parse(value, exact=True))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Validation did not foresee this content; without the translation it would stop the
            # partition.
            raise InvalidRecord(f"cannot be read: {error!r}") from error
        await self._types.require([submission.type])
        task_type = self._types.get(submission.type)
        if task_type is None:
            raise UnknownType(f"no task type {submission.type!r} is registered", pointer="/type")
        if task_type.is_strict:
            submission = with_digest(submission)
        context = await self._objects.check_in(submission.context, namespace_of(submission.type))
        return (
            submission if context is submission.context else dataclasses.replace(submission, context=context)
        )
