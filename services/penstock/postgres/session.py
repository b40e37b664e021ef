"""A session of one's own: what it locks and listens to lasts exactly as long as its connection."""

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

    Statements that a lock must protect go through the connection that holds the lock: when it is gone, so is
    the lock, and the statement fails instead of acting on a right that has passed to somebody else.
    """

    def __init__(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self.connection = connection
        self.lost = asyncio.Event()
        connection.add_termination_listener(self._on_termination)

    def _on_termination(self, _connection: Any) -> None:
        self.lost.set()

    @property
    def pid(self) -> int:
        """Of the server's process, by which others see this session."""
        return int(self.connection.get_server_pid())

    def ensure(self) -> None:
        """Does nothing while the session lives and its server takes writes.

        Raises:
            SessionLost: the connection has ended, or is to a server that has been demoted.
        """
        if self.lost.is_set() or self.connection.is_closed():
            raise SessionLost("the PostgreSQL session has ended, and its locks with it")
        if read_only(self.connection):
            raise SessionLost(f"PostgreSQL: {READ_ONLY}")

    async def probe(self) -> None:
        """As `ensure`, for whoever asks whether this process is ready."""
        self.ensure()

    async def listen(self, channel: str, heard: Callable[[str], None]) -> None:
        """Calls `heard` with the payload of each notification on `channel`.

        Raises:
            PostgresUnavailable: the connection has ended.
        """
        with translated():
            await self.connection.add_listener(channel, lambda _c, _p, _ch, payload: heard(str(payload)))

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
        durable: False when a commit need not be on disk before it counts: a crash of the server may undo the last
            moments of this session, in whole transactions, as if they had never been.

    Raises:
        PostgresUnavailable: no server.
    """
    connection = await connect(dsn, name, durable=durable)
    session = Session(connection)
    try:
        yield session
    finally:
        connection.remove_termination_listener(session._on_termination)  # noqa: SLF001 (our own class)
        # Closing politely waits for the server; one that has gone away must not keep us.
        try:
            await asyncio.wait_for(connection.close(), 5)
        except (TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            connection.terminate()
