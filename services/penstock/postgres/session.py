"""A dedicated session: its locks and subscriptions last exactly as long as its connection.

The server ends a session that sends nothing for `VANISHED_S` seconds, and frees its locks. So a
frozen process and a host without power or network lose their locks. A live process pings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from asyncpg.protocol.protocol import PreparedStatementState

from penstock.errors import LockConflict, SessionLost
from penstock.postgres.connection import READ_ONLY, close, connect, read_only, translated
from penstock.postgres.queries import bound
from penstock.sockets import VANISHED_S

# Seconds between two pings. The difference to `VANISHED_S` is how long a loop may stall.
PING_EVERY_S = 2.0

log = logging.getLogger(__name__)

# Lock timeout of sessions that repeat conflicting statements: longer than PostgreSQL takes to find
# a deadlock, and much shorter than PENSTOCK_STALL_TIMEOUT_S.
LOCK_TIMEOUT = "2s"
CONFLICT_PAUSE_S = 0.05


class Session:
    """One connection that is not shared and not replaced.

    A statement that a lock protects goes through the connection that holds the lock. When the
    connection is gone the lock is too, and the statement fails instead of acting on a lock that
    another process may hold.

    Attributes:
        lost: set when the connection has ended.
        lock_conflicts: statements that were repeated after a lock conflict.
    """

    def __init__(
        self, connection: asyncpg.Connection[asyncpg.Record], *, repeats_conflicts: bool = False
    ) -> None:
        self._connection = connection
        self._repeats_conflicts = repeats_conflicts
        self.lock_conflicts = 0
        # The driver refuses two statements at once, and pings and statements of the owner take
        # turns.
        self._turn = asyncio.Lock()
        self.lost = asyncio.Event()
        connection.add_termination_listener(self._on_termination)

    def _on_termination(self, _connection: Any) -> None:
        self.lost.set()

    @property
    def pid(self) -> int:
        """The id of the server's process, by which other sessions see this one."""
        return int(self._connection.get_server_pid())

    def ensure(self) -> None:
        """Checks that the session lives and its server takes writes.

        Raises:
            SessionLost: the connection has ended, or leads to a server that was demoted.
        """
        if self.lost.is_set() or self._connection.is_closed():
            raise SessionLost("the PostgreSQL session has ended, and its locks with it")
        if read_only(self._connection):
            raise SessionLost(f"PostgreSQL: {READ_ONLY}")

    async def probe(self) -> None:
        """As `ensure`, for the readiness probe."""
        self.ensure()

    async def listen(self, channel: str, on_notify: Callable[[str], None]) -> None:
        """Calls `on_notify` with the payload of each notification on `channel`.

        Raises:
            PostgresUnavailable: the connection has ended.
        """
        async with self.connection() as connection:
            await connection.add_listener(channel, lambda _c, _p, _ch, payload: on_notify(str(payload)))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        """The connection, for the statements of a `with` block.

        Raises:
            SessionLost: the connection has ended.
            PostgresUnavailable: the server refused for now.
        """
        async with self._turn:
            self.ensure()
            with translated():
                yield self._connection

    async def fetch(self, name: str, /, *arguments: Any, **named: Any) -> list[asyncpg.Record]:
        """The rows of a named query, with arguments as of `penstock.postgres.queries.bound`.

        Raises:
            SessionLost: the connection has ended. PostgresUnavailable: the server refused for now.
                LockConflict: a statement met locks, and the session does not repeat it.
        """
        while True:
            try:
                async with self.connection() as connection:
                    rows: list[asyncpg.Record] = await connection.fetch(*bound(name, *arguments, **named))
            except LockConflict as error:
                if not self._repeats_conflicts:
                    raise
                self.lock_conflicts += 1
                log.warning(
                    "A statement met locks of another transaction and is repeated",
                    extra={"event": "lock_conflict", "statement": name, "error": str(error)},
                )
                await asyncio.sleep(CONFLICT_PAUSE_S)
            else:
                return rows

    async def fetchval(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """The first value of the first row of a named query; errors as `fetch`."""
        rows = await self.fetch(name, *arguments, **named)
        return rows[0][0] if rows else None

    async def keep_alive(self) -> None:
        """Pings until the session is lost; a ping without an answer ends it."""
        while not self.lost.is_set():
            await asyncio.sleep(PING_EVERY_S)
            if self._turn.locked():
                continue  # a statement keeps the session alive, too
            async with self._turn:
                try:
                    await _ping(self._connection)
                except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    self._connection.terminate()
                    self.lost.set()


async def _ping(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """Closes a statement that does not exist, which the server answers without a transaction.

    An idle deployment makes close to no queries (S6), so a ping must not be a query.
    """
    protocol: Any = connection._protocol  # type: ignore[attr-defined]  # noqa: SLF001 (the driver has no such call)
    none = PreparedStatementState("penstock_ping", "", protocol, asyncpg.Record, False)  # noqa: FBT003 (it takes no names)
    await protocol.close_statement(none, VANISHED_S - PING_EVERY_S)


@asynccontextmanager
async def open_session(
    dsn: str,
    name: str,
    *,
    durable: bool = True,
    locks: bool = True,
    repeats_conflicts: bool = False,
    lock_timeout: str = LOCK_TIMEOUT,
    generic_plans: bool = False,
) -> AsyncIterator[Session]:
    """A session for the time of a `with` block.

    Args:
        dsn: connection URL.
        name: shown in `pg_stat_activity`.
        durable: False when a commit need not wait for the disk: a crash of the server may then undo
            the last transactions of this session.
        locks: False for a session that holds none: it needs no pings.
        repeats_conflicts: whether a statement that meets the locks of another transaction is
            repeated until it succeeds. `lock_conflicts` counts its repetitions, which show that the
            session is not stalled.
        lock_timeout: how long a statement of such a session waits for a lock.
        generic_plans: see `penstock.postgres.connection.GENERIC_PLANS`.

    Raises:
        PostgresUnavailable: no server.
    """
    connection = await connect(
        dsn,
        name,
        durable=durable,
        idle_s=VANISHED_S if locks else 0,
        lock_timeout=lock_timeout if repeats_conflicts else None,
        generic_plans=generic_plans,
    )
    session = Session(connection, repeats_conflicts=repeats_conflicts)
    pings = asyncio.create_task(session.keep_alive()) if locks else None
    try:
        yield session
    finally:
        if pings is not None:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)
        connection.remove_termination_listener(session._on_termination)  # noqa: SLF001 (our own class)
        await close(connection)
