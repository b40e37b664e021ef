"""Counters of what waits: folds what statements have changed into them, and keeps what metrics tell of them.

Whoever changes tasks leaves a row for each change (migration 0017); the owner of a type takes these into its counters, a
moment after it has heard of something and until there are none. What a crash interrupts is folded by the next owner: both
together are right at any time, so folding only keeps them few.

It is no part of releasing: when PostgreSQL is away it tries again, since who releases ends by then.
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
from penstock.postgres.backlog import STATES, Line
from penstock.task_sync.release import Release
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Between two folds while there is something to fold; longer where these take long, so that they take no more than a twentieth.
FOLD_S = 2.0
SHARE = 20


class Counting:
    """The counters of the types that this process owns.

    Args:
        settings: of the service.
        pool: of the database.
        gate: tells which types are owned.
    """

    def __init__(self, settings: TaskSyncSettings, pool: asyncpg.Pool[asyncpg.Record], gate: Release) -> None:
        self._settings = settings
        self._pool = pool
        self._gate = gate
        self._moving = True
        self._again_s = float("inf")
        self._patience_s = FOLD_S
        self._names: list[str] = []
        self._lines: list[Line] = []
        self._read_s = 0.0
        self._swept_s = float("-inf")

    def heard(self, _type_name: str) -> None:
        """A notification: something became ready, so something has changed."""
        self._moving = True

    async def run(self) -> None:
        """Folds until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            if self._moving or begun_s >= self._again_s or self._names != self._owned():
                await self._fold()
            await asyncio.sleep(max(FOLD_S, SHARE * (loop.time() - begun_s)))

    async def _fold(self) -> None:
        now_s = asyncio.get_running_loop().time()
        # Before the statement: what is heard while it runs must be folded by the next one.
        self._moving = False
        names = self._owned()
        sweep = now_s - self._swept_s >= self._settings.sweep_s
        try:
            changes, in_flight = await backlog.fold(self._pool, names)
            if sweep:
                await backlog.sweep(self._pool, names)
                self._swept_s = now_s
            if self._settings.metrics_port and (changes or sweep or names != self._names):
                self._lines = await backlog.lines(self._pool, among=names)
                self._read_s = asyncio.get_running_loop().time()
        except PostgresUnavailable as error:
            log.warning("what waits is not counted now: %s", error)
            self._moving = True
            return
        self._names = names
        if changes:
            self._moving, self._patience_s = True, FOLD_S
            return
        # What is in flight ends without a word to anybody; who takes long is looked for ever more rarely.
        self._patience_s = min(2 * self._patience_s, self._settings.sweep_s)
        self._again_s = now_s + (self._patience_s if in_flight else self._settings.sweep_s)

    def _owned(self) -> list[str]:
        return sorted(gate.type.name for gate in self._gate.gates())

    def samples(self) -> Iterator[Sample]:
        """As they were when they were read last; what is not owned any more is another process's to tell."""
        passed_s = asyncio.get_running_loop().time() - self._read_s
        owned = set(self._owned())
        for line in self._lines:
            if line.type not in owned:
                continue
            labels = (line.type, line.stage, line.priority.name)
            for state in STATES:
                yield Sample(metrics.BACKLOG, getattr(line, state), (*labels, state))
            if line.oldest_s is not None:
                yield Sample(metrics.BACKLOG_OLDEST, line.oldest_s + passed_s, labels)
