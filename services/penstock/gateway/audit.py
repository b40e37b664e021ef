"""The audit of requests: who sent each request that may change something, and what it changed.

Every authenticated request that may change something is in `audit_request` after `WRITE_DELAY_S`,
also when it was refused or failed. It fails closed: while `MAX_PENDING` entries wait for
PostgreSQL, such requests are answered 503 and not executed. Those refusals are not in the audit;
the log has their number. A killed process loses the entries of its last moments; a normal stop
writes all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from datetime import UTC, datetime
from http import HTTPStatus
from typing import NamedTuple

import asyncpg
from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.core.access import Action, storable
from penstock.errors import PostgresUnavailable
from penstock.gateway.access import GRANT
from penstock.gateway.changes import noted
from penstock.gateway.request_metrics import CLIENT_CLOSED_REQUEST
from penstock.gateway.rules import RULES, route_of
from penstock.postgres import audit

log = logging.getLogger(__name__)

WRITE_DELAY_S = 0.2
MAX_PENDING = 20_000
_ENTRIES_PER_STATEMENT = 2_000
_RETRY_S = 1.0
_PRUNE_INTERVAL_S = 3600.0
_PRUNE_BATCH = 5_000
# Statuses of requests that were not executed.
_REFUSALS = frozenset({401, 403, 413, 429, 503})

NOTHING_CHANGED = web.RequestKey("nothing_changed", bool)


class _Entry(NamedTuple):
    at: datetime
    actor: str
    route: str
    path: str
    status: int
    remote: str | None
    change: str | None


class RequestAudit:
    """The middleware that collects entries, and the loop that writes them.

    Args:
        pool: the database.
        days: age at which rows are removed.
        max_pending: entries that may wait for the database.
    """

    def __init__(
        self, pool: asyncpg.Pool[asyncpg.Record], days: int, *, max_pending: int = MAX_PENDING
    ) -> None:
        self._pool = pool
        self._days = days
        self._max_pending = max_pending
        self._pending: deque[_Entry] = deque()
        self._added = asyncio.Event()
        self._omitted = 0

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Adds an entry; it is the outermost middleware, so that it sees the final status."""
        status = CLIENT_CLOSED_REQUEST
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._add(request, status)

    def _add(self, request: web.Request, status: int) -> None:
        grant, route = request.get(GRANT), route_of(request)
        if grant is None or route is None or request.get(NOTHING_CHANGED):
            return
        if RULES[route] is Action.READ:
            return
        if len(self._pending) >= self._max_pending and status in _REFUSALS:
            # Bounds the memory while clients repeat refused requests.
            self._omitted += 1
            return
        self._pending.append(
            _Entry(
                datetime.now(UTC),
                grant.actor,
                route,
                storable(request.path[:200]),
                status,
                request.remote,
                noted(request) if status < HTTPStatus.BAD_REQUEST else None,
            )
        )
        self._added.set()

    def require_room(self) -> None:
        """Checks that a change can be audited.

        Raises:
            PostgresUnavailable: too many entries wait.
        """
        if len(self._pending) >= self._max_pending:
            raise PostgresUnavailable("the audit cannot be written, so changes are refused until it can")

    async def run(self) -> None:
        """Writes new entries and removes old rows, until cancelled."""
        loop = asyncio.get_running_loop()
        prune_at = loop.time()
        while True:
            try:
                async with asyncio.timeout(max(0.0, prune_at - loop.time())):
                    await self._added.wait()
                # Entries that arrive during this delay share one statement.
                await asyncio.sleep(WRITE_DELAY_S)
            except TimeoutError:
                pass
            self._added.clear()
            try:
                await self.write()
                if loop.time() >= prune_at:
                    prune_at = loop.time() + _PRUNE_INTERVAL_S
                    while await audit.prune(self._pool, self._days, limit=_PRUNE_BATCH) == _PRUNE_BATCH:
                        pass
            except PostgresUnavailable as error:
                log.warning(
                    "The audit cannot be written; trying again",
                    extra={"event": "audit_delayed", "pending": len(self._pending), "error": error},
                )
                self._added.set()
                await asyncio.sleep(_RETRY_S)

    async def write(self) -> None:
        """Writes all pending entries.

        Raises:
            PostgresUnavailable: some entries are still pending.
        """
        while self._pending:
            entries = [self._pending[i] for i in range(min(_ENTRIES_PER_STATEMENT, len(self._pending)))]
            await audit.write(self._pool, entries)
            # Entries are removed after the write, so that a failed write loses none. Meanwhile
            # entries are added at the end only.
            for _ in entries:
                self._pending.popleft()
        if self._omitted:
            log.warning(
                "The audit can be written again; it lacks refused requests",
                extra={"event": "audit_recovered", "omitted": self._omitted},
            )
            self._omitted = 0
