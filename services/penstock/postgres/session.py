"""A dedicated session: its locks and subscriptions last exactly as long as its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from penstock.errors import SessionLost
from penstock.postgres.connection import READ_ONLY, connect, read_only, translated
from penstock.postgres.queries import query


class Session:
    """One connection that is not shared and not replaced.

    A statement that a lock protects goes through the connection that holds the lock. When the
    connection is gone the lock is too, and the statement fails instead of acting on a lock that
    another process may hold.
    """

    def __init__(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self.connection = connection
        self.lost = asyncio.Event()
        connection.add_termination_listener(self._on_termination)

    def _on_termination(self, _connection: Any) -> None:
        self.lost.set()

    @property
    def pid(self) -> int:
        """The id of the server's process, by which other sessions see this one."""
        return int(self.connection.get_server_pid())

    def ensure(self) -> None:
        """Checks that the session lives and its server takes writes.

        Raises:
            SessionLost: the connection has ended, or leads to a server that was demoted.
        """
        if self.lost.is_set() or self.connection.is_closed():
            raise SessionLost("the PostgreSQL session has ended, and its locks with it")
        if read_only(self.connection):
            raise SessionLost(f"PostgreSQL: {READ_ONLY}")

    async def probe(self) -> None:
        """As `ensure`, for the readiness probe."""
        self.ensure()

    async def listen(self, channel: str, on_notify: Callable[[str], None]) -> None:
        """Calls `on_notify` with the payload of each notification on `channel`.

        Raises:
            PostgresUnavailable: the connection has ended.
        """
        with translated():
            await self.connection.add_listener(channel, lambda _c, _p, _ch, payload: on_notify(str(payload)))

    async def fetch(self, name: str, *arguments: Any) -> list[asyncpg.Record]:
        """The rows of a named query.

        Raises:
            SessionLost: the connection has ended.
            PostgresUnavailable: the server refused for now.
        """
        self.ensure()
        with translated():
            rows: list[asyncpg.Record] = await self.connection.fetch(query(name), *arguments)
        return rows

    async def fetchval(self, name: str, *arguments: Any) -> Any:
        """The first value of the first row of a named query; errors as `fetch`."""
        rows = await self.fetch(name, *arguments)
        return rows[0][0] if rows else None


@asynccontextmanager
async def open_session(dsn: str, name: str, *, durable: bool = True) -> AsyncIterator[Session]:
    """A session for the time of a `with` block.

    Args:
        dsn: connection URL.
        name: shown in `pg_stat_activity`.
        durable: False when a commit need not wait for the disk: a crash of the server may then undo
            the last transactions of this session.

    Raises:
        PostgresUnavailable: no server.
    """
    connection = await connect(dsn, name, durable=durable)
    session = Session(connection)
    try:
        yield session
    finally:
        connection.remove_termination_listener(session._on_termination)  # noqa: SLF001 (our own class)
        # A graceful close waits for the server; an unreachable one must not delay the stop.
        try:
            await asyncio.wait_for(connection.close(), 5)
        except (TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            connection.terminate()
