"""Tasks from records (`penstock.ingest.RecordHandler`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg

from penstock.contracts.submission import Submission
from penstock.errors import IdempotencyConflict
from penstock.ingest import SubmissionHandler
from penstock.kafka.topology.topics import SUBMITTED, SUBMITTED_REJECTED
from penstock.postgres.connection import translated
from penstock.postgres.ingest_positions import OffsetRange
from penstock.postgres.repeating import transacted
from penstock.postgres.tasks import Submitted
from penstock.submission import TaskKind


class TaskHandler(SubmissionHandler[Submission, Submitted | IdempotencyConflict]):
    """Handles the records of the topic `submitted`.

    Args:
        pool: of the database.
        kind: reads and inserts tasks.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], kind: TaskKind) -> None:
        super().__init__(SUBMITTED, SUBMITTED_REJECTED, pool, kind)

    async def insert(self, items: Sequence[Submission], source: OffsetRange) -> None:
        """See `RecordHandler.insert`."""
        if all(submission.context_digest is None for submission in items):
            await super().insert(items, source)
            return

        async def insert(connection: Any) -> None:
            for outcome in await self._kind.insert(connection, items, source):
                if isinstance(outcome, IdempotencyConflict):
                    # Rolls the batch back: the rejection must be on Kafka before the offset moves.
                    raise outcome

        with translated():
            await transacted(self._pool, insert)
