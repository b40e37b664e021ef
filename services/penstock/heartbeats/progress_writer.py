"""Writes the progress of attempts to PostgreSQL, at a rate that does not grow with their reports.

Only the last report of an attempt waits, and a statement each second writes those of the attempts
that have waited longest. Progress is shown to people and decides nothing: a report that waits is
lost with this process, and the handler's next one replaces it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import asyncpg

from penstock import metrics
from penstock.concurrency.retry import retry_until_available
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.core.attempt import AttemptId
from penstock.errors import PostgresUnavailable, ValueRefused
from penstock.metrics import Sample
from penstock.postgres import progress
from penstock.postgres.halving import in_halves
from penstock.postgres.progress import Report

log = logging.getLogger(__name__)

WRITE_EVERY_S = 1.0
ROWS_PER_WRITE = 1_000
# Most attempts whose reports wait. Those of further attempts are dropped, so that an outage of
# PostgreSQL does not fill the memory.
MAX_WAITING = 100_000
# Writes between two removals of the progress of attempts that are over.
WRITES_PER_SWEEP = 60


class ProgressWriter:
    """The reports that are not in PostgreSQL yet.

    Args:
        pool: of the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        # In order of arrival; a newer report of an attempt keeps the place of the older one.
        self._waiting: dict[AttemptId, Report] = {}
        self._written = 0

    def samples(self) -> Iterator[Sample]:
        """The current samples (`penstock.metrics`)."""
        yield Sample(metrics.PROGRESS_WRITTEN, self._written)

    def add(self, heartbeat: Heartbeat, timestamp_s: float) -> None:
        """Adds the reports of a heartbeat.

        Args:
            heartbeat: the record.
            timestamp_s: when Kafka received it, in seconds since 1970.
        """
        if not heartbeat.progress or heartbeat.kind is not Kind.BEAT:
            return
        at = datetime.fromtimestamp(timestamp_s, UTC)
        for attempt_id, reported in heartbeat.progress.items():
            if attempt_id in self._waiting or len(self._waiting) < MAX_WAITING:
                self._waiting[attempt_id] = Report(attempt_id, heartbeat.worker, reported, at)

    async def run(self) -> None:
        """Writes until cancelled; reports wait while PostgreSQL is unavailable."""
        while True:
            for _ in range(WRITES_PER_SWEEP):
                await asyncio.sleep(WRITE_EVERY_S)
                if self._waiting:
                    await retry_until_available(
                        self._write, waiting_for="progress of attempts", retry_on=(PostgresUnavailable,)
                    )
            await retry_until_available(
                lambda: progress.sweep(self._pool),
                waiting_for="removal of progress",
                retry_on=(PostgresUnavailable,),
            )

    async def _write(self) -> None:
        reports = [report for report, _ in zip(self._waiting.values(), range(ROWS_PER_WRITE), strict=False)]
        for part, answer in await in_halves(reports, lambda part: progress.write(self._pool, part)):
            if isinstance(answer, ValueRefused):
                log.warning(
                    "A report of progress has a value that PostgreSQL cannot store; dropping it",
                    extra={
                        "event": "progress_unstorable",
                        "task": part[0].attempt_id.task_id,
                        "error": answer.reason,
                    },
                )
            else:
                self._written += answer
        for report in reports:
            if self._waiting.get(report.attempt_id) is report:
                del self._waiting[report.attempt_id]
