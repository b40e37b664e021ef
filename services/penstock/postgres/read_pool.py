"""Connections of their own for reads, so that no number of reads delays a write.

What this module guarantees: statements inside `reading` use a pool of their own, whose statements
the server ends after `STATEMENT_S`. One reader has one list at a time, and its reads by id leave a
connection to other readers. Lists leave one to reads by id. Reads that wait too long are refused.

Fails open towards writes: a statement outside `reading` uses the pool of writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import asyncpg

from penstock.errors import Throttled
from penstock.postgres.connection import open_pool

# Seconds for a statement of a read, and for which a read waits for its turn.
STATEMENT_S = 5
WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads.

    Attributes:
        actor: shares the bounds of lists and of reads by id.
        lists: whether the read may take long, rather than naming its rows by id.
    """

    actor: str
    lists: bool


_READER: ContextVar[Reader | None] = ContextVar("reader", default=None)


@contextmanager
def reading(actor: str, *, lists: bool) -> Iterator[None]:
    """Makes the statements of the block reads.

    Args:
        actor: see `Reader`.
        lists: see `Reader`.
    """
    token = _READER.set(Reader(actor, lists))
    try:
        yield
    finally:
        _READER.reset(token)


class SplitPool:
    """A pool of writes that sends the statements of reads to another pool.

    Args:
        writes: the pool of writes.
        reads: the pool of reads.
        size: connections of the pool of reads, at least 2.
    """

    def __init__(
        self, writes: asyncpg.Pool[asyncpg.Record], reads: asyncpg.Pool[asyncpg.Record], size: int
    ) -> None:
        self._writes = writes
        self._reads = reads
        self._most = size - 1
        self._lists = asyncio.Semaphore(self._most)
        # The turns of each reader, and how many have or await them.
        self._turns: dict[Reader, tuple[asyncio.Semaphore, int]] = {}

    def acquire(self, *, timeout: float | None = None) -> Any:
        """As the driver's method."""
        reader = _READER.get()
        return self._writes.acquire(timeout=timeout) if reader is None else self._read(reader)

    async def release(self, connection: Any) -> None:
        """As the driver's method, for a connection of `await acquire()`, which only writes have."""
        await self._writes.release(connection)

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109 (the driver's signature)
        """As the driver's method."""
        async with self.acquire() as connection:
            return await connection.execute(query, *args, timeout=timeout)

    async def fetch(self, query: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109 (the driver's signature)
        """As the driver's method."""
        async with self.acquire() as connection:
            return await connection.fetch(query, *args, timeout=timeout)

    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109 (the driver's signature)
        """As the driver's method."""
        async with self.acquire() as connection:
            return await connection.fetchrow(query, *args, timeout=timeout)

    async def fetchval(
        self,
        query: str,
        *args: Any,
        column: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 (the driver's signature)
    ) -> Any:
        """As the driver's method."""
        async with self.acquire() as connection:
            return await connection.fetchval(query, *args, column=column, timeout=timeout)

    @asynccontextmanager
    async def _read(self, reader: Reader) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(WAIT_S):
                    await stack.enter_async_context(self._turn(reader))
                    if reader.lists:
                        await stack.enter_async_context(self._lists)
                    connection = await stack.enter_async_context(self._reads.acquire())
            except TimeoutError as error:
                raise Throttled(
                    f"other reads use the connections for reads since {WAIT_S:g} s: send fewer at a time"
                ) from error
            yield connection

    @asynccontextmanager
    async def _turn(self, reader: Reader) -> AsyncIterator[None]:
        turn, users = self._turns.get(reader, (asyncio.Semaphore(1 if reader.lists else self._most), 0))
        self._turns[reader] = (turn, users + 1)
        try:
            async with turn:
                yield
        finally:
            turn, users = self._turns.pop(reader)
            if users > 1:
                self._turns[reader] = (turn, users - 1)


@asynccontextmanager
async def open_split_pool(
    dsn: str, name: str, *, size: int, reads: int, pooled: bool
) -> AsyncIterator[asyncpg.Pool[asyncpg.Record]]:
    """A pool for writes, with another for the statements inside `reading`.

    Args:
        dsn: connection URL.
        name: shown in `pg_stat_activity`.
        size: most connections of writes.
        reads: most connections of reads, at least 2.
        pooled: whether the URL leads to a pooler in transaction mode.

    Raises:
        PostgresUnavailable, SettingsError, CannotStart: see `open_pool`.
    """
    async with (
        open_pool(dsn, name, pooled=pooled, size=size) as writing,
        open_pool(dsn, f"{name} reads", pooled=pooled, size=reads, statement_s=STATEMENT_S) as of_reads,
    ):
        # It has the methods of a pool that our statements use.
        yield cast("asyncpg.Pool[asyncpg.Record]", SplitPool(writing, of_reads, reads))
