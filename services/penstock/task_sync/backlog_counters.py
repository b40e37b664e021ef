"""Maintains the backlog counters of the owned types, and serves them as metrics.

Triggers record each change of tasks in its transaction. The owner of a type folds the changes into
its counters until none is left. Counters and changes together are exact at any time,
so a crash loses nothing; folding only keeps the changes few.

While PostgreSQL is unavailable it tries again: the service begins again when the session of
the release loop is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import asyncpg

from penstock import metrics
from penstock.errors import PostgresUnavailable
from penstock.metrics import Sample
from penstock.postgres import backlog
from penstock.postgres.backlog import STATES, BacklogEntry
from penstock.task_sync.owned_topics import OwnedTopics
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Seconds between folds while there are changes; longer after a slow fold, so that folds take at
# most a twentieth of the time.
FOLD_S = 2.0
IDLE_PER_FOLD = 20


class BacklogCounters:
    """The counters of the types that this process owns.

    Args:
        settings: of the service.
        pool: of the database.
        topics: of the types that are owned.
    """

    def __init__(
        self, settings: TaskSyncSettings, pool: asyncpg.Pool[asyncpg.Record], topics: OwnedTopics
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._topics = topics
        self._may_have_changes = True
        # When to fold without a notification, and how long that was after the last fold.
        self._fold_at_s = float("inf")
        self._fold_interval_s = FOLD_S
        self._folded_types: list[str] = []
        self._entries: list[BacklogEntry] = []
        self._read_s = 0.0
        self._swept_s = float("-inf")

    def on_ready(self, _type_name: str) -> None:
        """A task became ready, so the backlog has changed."""
        self._may_have_changes = True

    async def run(self) -> None:
        """Folds until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            if self._may_have_changes or began_s >= self._fold_at_s or self._folded_types != self._owned():
                await self._fold()
            await asyncio.sleep(max(FOLD_S, IDLE_PER_FOLD * (loop.time() - began_s)))

    async def _fold(self) -> None:
        now_s = asyncio.get_running_loop().time()
        # Before the statement: the next fold must see changes that are notified while it runs.
        self._may_have_changes = False
        names = self._owned()
        sweep = now_s - self._swept_s >= self._settings.sweep_s
        try:
            changes, in_flight = await backlog.fold(self._pool, names)
            if sweep:
                await backlog.delete_empty(self._pool, names)
                self._swept_s = now_s
            if self._settings.metrics_port and (changes or sweep or names != self._folded_types):
                self._entries = await backlog.entries(self._pool, among=names)
                self._read_s = asyncio.get_running_loop().time()
        except PostgresUnavailable as error:
            log.warning(
                "The backlog counters are not updated now", extra={"event": "fold_delayed", "error": error}
            )
            self._may_have_changes = True
            return
        self._folded_types = names
        if changes:
            self._may_have_changes, self._fold_interval_s = True, FOLD_S
            return
        # The end of a task in flight sends no notification, so poll; ever more rarely while there
        # are no changes.
        self._fold_interval_s = min(2 * self._fold_interval_s, self._settings.sweep_s)
        self._fold_at_s = now_s + (self._fold_interval_s if in_flight else self._settings.sweep_s)

    def _owned(self) -> list[str]:
        return sorted(topic.type.name for topic in self._topics.ready_topics())

    def samples(self) -> Iterator[Sample]:
        """The counters as they were last read, of types that are still owned."""
        elapsed_s = asyncio.get_running_loop().time() - self._read_s
        owned = set(self._owned())
        for entry in self._entries:
            if entry.type not in owned:
                continue
            labels = (entry.type, entry.stage, entry.priority.name)
            for state in STATES:
                yield Sample(metrics.BACKLOG, getattr(entry, state), (*labels, state))
            if entry.oldest_s is not None:
                yield Sample(metrics.BACKLOG_OLDEST, entry.oldest_s + elapsed_s, labels)
