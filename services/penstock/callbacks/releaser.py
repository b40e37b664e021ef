"""The releaser: writes the records of callbacks whose time has come, be it a retry or a record that got lost.

Any number of replicas may run it; the lock in its session lets one act, and every statement goes through that
session: when it is lost, the statement fails and with it the process. Writing a record twice is harmless
(`begin` takes each attempt once), not writing it is not, so in doubt it writes.

It sleeps until the next callback is due, and is told when one is scheduled for earlier. Since it is the only one, it also
forgets targets that are quiet (`forgetting`).
"""

from __future__ import annotations

import asyncio
import logging

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.callbacks.forgetting import Forgetting
from penstock.callbacks.settings import CallbacksSettings
from penstock.errors import PostgresUnavailable
from penstock.kafka.outbox import redeliver
from penstock.postgres import callbacks
from penstock.postgres.session import Session

log = logging.getLogger(__name__)

ROWS_AT_A_TIME = 500
# Between two looks there is at least this much, however much falls due: a retry is late by no more.
SHORTEST_SLEEP_S = 0.2
# And at most this much, or half the horizon: nobody announces an attempt whose fate will stay unknown.
LONGEST_SLEEP_S = 30.0
# How soon another process takes over from one that died.
OWN_EVERY_S = 5.0


class Releaser:
    """Releases what is due.

    Args:
        settings: of the service.
        session: whose lock is the right to release.
        pool: for notifications to the process that has the right.
        producer: acks=all.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        session: Session,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
    ) -> None:
        self._settings = settings
        self._session = session
        self._pool = pool
        self._producer = producer
        self._longest_s = min(LONGEST_SLEEP_S, settings.callback_horizon_s / 2)
        self._forgetting = Forgetting(settings, session)
        self._owned = False
        self._look_at_s = 0.0
        self._sooner = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    async def scheduled(self, due_in_s: float) -> None:
        """Something is due in so many seconds: this or another process shall not sleep past it."""
        if self._owned:
            self._expect(due_in_s)
            return
        try:
            await callbacks.announce(self._pool, due_in_s)
        except PostgresUnavailable as error:
            log.warning("a retry may be late by %.0f s: %s", self._longest_s, error)

    async def run(self) -> None:
        """Releases until cancelled.

        Raises:
            SessionLost: the right is gone with its session.
            PostgresUnavailable, KafkaUnavailable: what was not written comes due again.
        """
        await self._session.listen(callbacks.DUE_CHANNEL, lambda payload: self._expect(float(payload)))
        while True:
            if not self._owned:
                self._owned = await callbacks.own(self._session)
                if not self._owned:
                    await self._sleep_until(self._clock() + OWN_EVERY_S)
                    continue
            looked_s = self._clock()
            self._look_at_s = looked_s + self._longest_s
            self._sooner.clear()
            await self._release()
            await self._forgetting.step()
            wait_s = await callbacks.next_due_s(self._session)
            if wait_s is not None:
                self._expect(wait_s)
            await self._sleep_until(looked_s + SHORTEST_SLEEP_S)
            while (left_s := self._look_at_s - self._clock()) > 0:
                self._sooner.clear()
                await self._sleep(left_s)

    async def _release(self) -> None:
        released = 0
        while True:
            rows = await callbacks.due(
                self._session, ROWS_AT_A_TIME, horizon_s=self._settings.callback_republish_s
            )
            await redeliver(self._producer, self._settings, rows)
            released += len(rows)
            if len(rows) < ROWS_AT_A_TIME:
                break
        if released:
            log.debug("released %d callbacks", released)

    def _expect(self, due_in_s: float) -> None:
        at_s = self._clock() + max(due_in_s, 0.0)
        if at_s < self._look_at_s:
            self._look_at_s = at_s
            self._sooner.set()

    async def _sleep_until(self, at_s: float) -> None:
        """Sleeps whatever is scheduled meanwhile, but not past the end of the session."""
        while (left_s := at_s - self._clock()) > 0:
            try:
                await asyncio.wait_for(self._session.lost.wait(), left_s)
            except TimeoutError:
                continue
            self._session.ensure()

    async def _sleep(self, for_s: float) -> None:
        """Sleeps until something is scheduled for sooner, but not past the end of the session."""
        waiters = [asyncio.ensure_future(event.wait()) for event in (self._sooner, self._session.lost)]
        try:
            await asyncio.wait(waiters, timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        self._session.ensure()
