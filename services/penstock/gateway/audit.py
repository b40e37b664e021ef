"""The audit: who asked for what that may have changed something, and what was answered.

What this module guarantees: every such request of somebody known is in `audit_request` within `WRITTEN_S`, also one that was refused for its
role or failed. When it cannot be written it fails closed: once `MOST_WAITING` wait, such requests are answered 503, and nothing
of them is done; such refusals are then left out of it, and counted in the log. What was answered in the last moments before a process is killed is lost from it; an orderly end writes all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from datetime import UTC, datetime
from typing import NamedTuple

import asyncpg
from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.core.access import Action, storable
from penstock.errors import PostgresUnavailable
from penstock.gateway.access import GRANT
from penstock.gateway.rules import RULES, route_of
from penstock.postgres import audit

log = logging.getLogger(__name__)

WRITTEN_S = 0.2
MOST_WAITING = 20_000
_AT_ONCE = 2_000
_AGAIN_S = 1.0
_PRUNED_EVERY_S = 3600.0
_PRUNED_AT_ONCE = 5_000
# When the client had gone before it was answered, as nginx writes it.
_GONE = 499
# Answers to requests that nobody has begun to carry out.
_REFUSALS = frozenset({401, 403, 413, 429, 503})

NOTHING_CHANGED = web.RequestKey("nothing_changed", bool)


class _Entry(NamedTuple):
    at: datetime
    actor: str
    route: str
    path: str
    status: int
    remote: str | None


class Audit:
    """Writes it down, for a middleware of its own: the outermost, so that it sees what is answered.

    Args:
        pool: of the database.
        days: after which rows are removed.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], days: int) -> None:
        self._pool = pool
        self._days = days
        self._waiting: deque[_Entry] = deque()
        self._come = asyncio.Event()
        self._left_out = 0

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Notes what becomes of a request."""
        status = _GONE
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._put(request, status)

    def _put(self, request: web.Request, status: int) -> None:
        grant, route = request.get(GRANT), route_of(request)
        if grant is None or route is None or request.get(NOTHING_CHANGED):
            return
        if RULES[route].action is Action.READ:
            return
        if len(self._waiting) >= MOST_WAITING and status in _REFUSALS:
            # Nothing was done. A client that tries again and again must not fill the memory.
            self._left_out += 1
            return
        self._waiting.append(
            _Entry(
                datetime.now(UTC),
                grant.actor,
                route,
                storable(request.path[:200]),
                status,
                request.remote,
            )
        )
        self._come.set()

    def require_room(self) -> None:
        """Does nothing while what is done can be written down.

        Raises:
            PostgresUnavailable: it cannot.
        """
        if len(self._waiting) >= MOST_WAITING:
            raise PostgresUnavailable("the audit cannot be written: nothing is changed until it can")

    async def run(self) -> None:
        """Writes what comes and removes what is old, until cancelled."""
        loop = asyncio.get_running_loop()
        prune_at = loop.time()
        while True:
            try:
                await asyncio.wait_for(self._come.wait(), max(0.0, prune_at - loop.time()))
                # What comes together is one statement.
                await asyncio.sleep(WRITTEN_S)
            except TimeoutError:
                pass
            self._come.clear()
            try:
                await self.write()
                if loop.time() >= prune_at:
                    prune_at = loop.time() + _PRUNED_EVERY_S
                    while await audit.prune(self._pool, self._days, most=_PRUNED_AT_ONCE) == _PRUNED_AT_ONCE:
                        pass
            except PostgresUnavailable as error:
                log.warning("the audit waits: %s", error)
                self._come.set()
                await asyncio.sleep(_AGAIN_S)

    async def write(self) -> None:
        """Writes all that waits.

        Raises:
            PostgresUnavailable: some of it still waits.
        """
        while self._waiting:
            entries = [self._waiting[number] for number in range(min(_AT_ONCE, len(self._waiting)))]
            await audit.write(self._pool, entries)
            # Only now: what was not written still waits. Others only add behind.
            for _ in entries:
                self._waiting.popleft()
        if self._left_out:
            log.warning("the audit is written again; %d refusals are not in it", self._left_out)
            self._left_out = 0
