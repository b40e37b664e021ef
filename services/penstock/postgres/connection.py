"""Connections: the one place where asyncpg's options are chosen and its errors translated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg

from penstock.errors import PostgresUnavailable

SCHEMA = "penstock"

# Raised while the server is away, starts, stops or is full, and for transactions worth repeating.
_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    # What a pooled connection raises whose end the driver has heard of but not yet acted upon.
    asyncpg.InternalClientError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.TransactionRollbackError,
    ConnectionError,
    OSError,
    TimeoutError,
)


@contextmanager
def translated() -> Iterator[None]:
    """Turns asyncpg's passing errors into `PostgresUnavailable`; a wrong statement stays what it is."""
    try:
        yield
    except _PASSING as error:
        raise PostgresUnavailable(f"PostgreSQL: {type(error).__name__}: {error}") from error


def _options(name: str) -> dict[str, Any]:
    return {
        "command_timeout": 60,
        "server_settings": {
            "application_name": f"penstock {name}",
            "search_path": SCHEMA,
            # Our statements are short and repeated: compiling them costs more than it saves.
            "jit": "off",
            # They name rows by key. The planner would go by statistics, which on a table where every row passes
            # through every state are stale at any time: seen were sequential scans and joins of every row with every other.
            "enable_seqscan": "off",
            "enable_nestloop": "off",
            "enable_mergejoin": "off",
        },
    }


async def connect(dsn: str, name: str, *, durable: bool = True) -> asyncpg.Connection[asyncpg.Record]:
    """One connection of its own, for locks and notifications.

    Args:
        dsn: connection URL.
        name: shown in `pg_stat_activity`.
        durable: see `penstock.postgres.session.open_session`.

    Raises:
        PostgresUnavailable: no server, or none that takes us.
    """
    options = _options(name)
    if not durable:
        options["server_settings"]["synchronous_commit"] = "off"
    with translated():
        return await asyncpg.connect(dsn, **options)


async def _leave_as_is(_connection: object) -> None:
    """Instead of a round trip after every use: nothing of ours leaves a trace in a pooled session.

    The driver still rolls back a transaction that was left open.
    """


@asynccontextmanager
async def open_pool(dsn: str, name: str, *, size: int = 4) -> AsyncIterator[asyncpg.Pool[asyncpg.Record]]:
    """A pool of at most `size` connections, closed at the end of the block.

    Raises:
        PostgresUnavailable: no server, or none that takes us.
    """
    with translated():
        pool = await asyncpg.create_pool(dsn, min_size=1, max_size=size, reset=_leave_as_is, **_options(name))
    try:
        yield pool
    finally:
        # A peer that has gone away must not keep us from stopping.
        try:
            await asyncio.wait_for(pool.close(), 5)
        except TimeoutError:
            pool.terminate()
