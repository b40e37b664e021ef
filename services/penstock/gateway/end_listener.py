"""Requests that wait until tasks or flows have ended.

PostgreSQL announces each end while a request waits (`schemas/postgres/queries/ends.sql`): one
session serves all requests of the process. A wait returns within milliseconds of the last end. In
doubt it reads again: after each loss of the session, and `RENEW_S` after the last reading. It
returns after its time in any case.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress

import asyncpg

from penstock import process
from penstock.concurrency.batcher import Batcher
from penstock.errors import PostgresUnavailable, SessionLost
from penstock.postgres import ends
from penstock.postgres.session import Session, open_session

log = logging.getLogger(__name__)

# Seconds after which the announcements are renewed, and after which they end without a renewal.
RENEW_S = 20.0
EXPIRY_S = 60.0
# A transaction that began before the announcements may end a task after the first reading.
RECHECK_S = 1.0
RETRY_S = 1.0
# Ids of one reading.
READ_IDS = 10_000


class _Wait:
    """A request that waits: ids whose ends it has not seen, and the event that wakes it.

    Args:
        ids: the ids.
        first: the first end wakes it, instead of the last one.
    """

    __slots__ = ("ended", "left", "wakes_at")

    def __init__(self, ids: Collection[int], *, first: bool) -> None:
        self.left = set(ids)
        self.wakes_at = len(self.left) - 1 if first else 0
        self.ended = asyncio.Event()

    def end(self, ids: Collection[int]) -> None:
        self.left.difference_update(ids)
        if len(self.left) <= self.wakes_at:
            self.ended.set()


class EndListener:
    """The waits of a process.

    Args:
        dsn: address of the database, for the session that receives the announcements.
        pool: reads what has ended.
    """

    def __init__(self, dsn: str, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._dsn = dsn
        self._pool = pool
        self._name = secrets.token_hex(8)
        self._waits: defaultdict[int, set[_Wait]] = defaultdict(set)
        self._reader = Batcher[_Wait](self._read, max_size=READ_IDS, size_of=lambda wait: len(wait.left))
        self._wanted = asyncio.Event()
        self._closed = False

    async def wait(self, ids: Collection[int], timeout_s: float, *, first: bool = False) -> None:
        """Returns when all of these tasks and flows have ended, or after `timeout_s` seconds.

        An id that names neither counts as ended.

        Args:
            ids: the ids.
            timeout_s: longest wait.
            first: return when the first of them has ended.
        """
        wait = _Wait(ids, first=first)
        for one in wait.left:
            self._waits[one].add(wait)
        self._wanted.set()
        try:
            if self._closed:
                return
            # Ends are announced to a registered wait, so none is missed after this reading.
            self._reader.add(wait)
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await wait.ended.wait()
        finally:
            self._unregister(wait, ids)

    def close(self) -> None:
        """Ends all waits, because the gateway stops."""
        self._closed = True
        for wait in self._all():
            wait.ended.set()

    async def run(self) -> None:
        """Receives announcements while requests wait, until cancelled."""
        await process.run_with_background(self._listen_when_wanted(), self._reader.run())

    async def _listen_when_wanted(self) -> None:
        while True:
            await self._wanted.wait()
            try:
                await self._listen()
            except (PostgresUnavailable, SessionLost) as error:
                log.warning(
                    "The gateway does not receive the ends of tasks; trying again",
                    extra={"event": "end_listener_lost", "error": error},
                )
                await asyncio.sleep(RETRY_S)

    async def _listen(self) -> None:
        """Receives announcements until no request has waited for `RENEW_S`."""
        async with open_session(self._dsn, "gateway ends", locks=False) as session:
            await session.listen(ends.CHANNEL, self._on_ended)
            await self._read_all(session)
            await _pause(session, RECHECK_S)
            await self._read_all(session)
            while self._wanted.is_set():
                self._wanted.clear()
                await _pause(session, RENEW_S)
                await self._read_all(session)
            await session.fetch("ends.leave", self._name)

    async def _read_all(self, session: Session) -> None:
        """Renews the announcements, and then reads what all requests wait for."""
        await session.fetch("ends.listen", self._name, EXPIRY_S)
        for wait in self._all():
            self._wanted.set()
            self._reader.add(wait)

    def _on_ended(self, payload: str) -> None:
        waits, none = self._waits, set[_Wait]()
        for text in payload.split():
            ended = int(text)
            for wait in waits.get(ended, none):
                wait.end((ended,))

    def _all(self) -> set[_Wait]:
        return {wait for waits in self._waits.values() for wait in waits}

    async def _read(self, waits: Sequence[_Wait]) -> None:
        ids = set[int]().union(*(wait.left for wait in waits))
        try:
            unfinished = await ends.unfinished(self._pool, ids)
        except PostgresUnavailable:
            # The next reading is due after the session is open again.
            return
        for wait in waits:
            wait.end(wait.left - unfinished)

    def _unregister(self, wait: _Wait, ids: Collection[int]) -> None:
        for one in ids:
            waits = self._waits.get(one)
            if waits is not None:
                waits.discard(wait)
                if not waits:
                    del self._waits[one]


async def _pause(session: Session, for_s: float) -> None:
    """Sleeps until the time is over, or the session is lost: then its next statement raises."""
    with suppress(TimeoutError):
        async with asyncio.timeout(for_s):
            await session.lost.wait()
