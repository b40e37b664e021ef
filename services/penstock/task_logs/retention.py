"""Deletes segments that have expired, and objects without a row that a crash has left.

One process does it at a time: its session holds the lock. A row is deleted before its object, so a
reader finds no row without an object.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta

from penstock.errors import ObjectsUnavailable, PostgresUnavailable, SessionLost
from penstock.metrics.rounds import ROUNDS
from penstock.objects import ObjectStore
from penstock.postgres import task_logs
from penstock.postgres.session import Session, open_session
from penstock.task_logs.segments import PREFIX
from penstock.task_logs.settings import TaskLogsSettings

log = logging.getLogger(__name__)

# Its name in metrics, and seconds between two rounds.
LOOP = "log_retention"
EVERY_S = 300.0
# Segments that one statement expires.
BATCH = 200
# An object of this age whose row is missing was left by a crash: a row follows its object at once.
ORPHAN_AGE = timedelta(hours=1)


class Retention:
    """Expires segments, and sweeps objects without rows.

    Args:
        settings: of the service.
        objects: the object store.

    Attributes:
        expired: segments whose rows were deleted.
        swept: objects without rows that were deleted.
    """

    def __init__(self, settings: TaskLogsSettings, objects: ObjectStore) -> None:
        self._settings = settings
        self._objects = objects
        self.expired = 0
        self.swept = 0

    async def run(self) -> None:
        """Runs rounds until cancelled."""
        ROUNDS.expect(LOOP, EVERY_S)
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.round()
            except (ObjectsUnavailable, PostgresUnavailable, SessionLost) as error:
                log.warning(
                    "Retention of task logs is delayed",
                    extra={"event": "log_retention_delayed", "error": error},
                )

    async def round(self) -> None:
        """Expires and sweeps once, unless another process does.

        Raises:
            ObjectsUnavailable, PostgresUnavailable, SessionLost: the round is incomplete.
        """
        async with open_session(self._settings.sessions, "task-logs retention", durable=False) as session:
            if not await task_logs.lock(session):
                return
            now = await task_logs.now(session)
            before = now - timedelta(days=self._settings.logs_days)
            while object_keys := await task_logs.expire(session, before, BATCH):
                self.expired += len(object_keys)
                await self._objects.delete(object_keys)
            await task_logs.forget_deletions(session, before)
            await self._sweep(session, now, before)
        ROUNDS.complete(LOOP)

    async def _sweep(self, session: Session, now: datetime, before: datetime) -> None:
        """Deletes objects without rows: of the last two days, and of those that have expired."""
        kept = {(now - timedelta(days=days)).strftime("%Y-%m-%d") for days in (0, 1)}
        oldest = before.strftime("%Y-%m-%d")
        for folder in await self._objects.folders(PREFIX):
            day = folder.rpartition("/")[2]
            if day in kept or day < oldest:
                await self._sweep_folder(session, folder, now - ORPHAN_AGE)

    async def _sweep_folder(self, session: Session, folder: str, before: datetime) -> None:
        async for page in self._objects.pages(folder):
            old = [object_key for object_key, stored_at in page if stored_at < before]
            if not old:
                continue
            orphans = sorted(set(old) - await task_logs.known_objects(session, old))
            await self._objects.delete(orphans)
            self.swept += len(orphans)
            if orphans:
                log.info(
                    "Objects of segments without a row were deleted",
                    extra={"event": "log_objects_swept", "objects": len(orphans)},
                )
