"""Executes the statements of `penstock check` and its repairs (checks.sql)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, TypeAlias

import asyncpg

from penstock.core.attempt import AttemptId
from penstock.postgres import queries
from penstock.postgres.connection import translated
from penstock.postgres.queries import query

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

# Rows that a cursor fetches at a time.
PAGE = 10_000
# Rows that one statement of a repair changes.
BATCH = 1_000
# Tasks or flows that one statement examines.
RANGE = 5_000
# The bound of each number: counting a large table would read all of it.
MOST_COUNTED = 100_000


async def fetch(pool: Pool, name: str, /, *arguments: Any, **named: Any) -> list[asyncpg.Record]:
    """The rows of a statement; a rule's first argument is how many of them.

    Raises:
        PostgresUnavailable: no server; of a repair, perhaps nothing was changed.
    """
    return await queries.fetch(pool, name, *arguments, **named)


async def counts(pool: Pool, name: str, /, *arguments: Any) -> dict[str, int]:
    """The numbers of a statement with two columns, by the first column.

    Raises:
        PostgresUnavailable: no server.
    """
    return {row[0]: row[1] for row in await fetch(pool, name, *arguments)}


async def repeat(pool: Pool, name: str, /, *arguments: Any, **named: Any) -> int:
    """Repeats a repair of at most `BATCH` rows until it changes fewer; returns the total.

    Raises:
        PostgresUnavailable: some rows may be changed, others not.
    """
    total = 0
    while True:
        changed = len(await fetch(pool, name, *arguments, **named))
        total += changed
        if changed < BATCH:
            return total


async def by_cursor(pool: Pool, name: str, /, *arguments: Any) -> AsyncIterator[list[asyncpg.Record]]:
    """The rows of a statement, a page at a time.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            cursor = await connection.cursor(query(name), *arguments)
            while rows := await cursor.fetch(PAGE):
                yield rows


async def by_ranges(
    pool: Pool, ranges: str, name: str, /, *arguments: Any
) -> AsyncIterator[list[asyncpg.Record]]:
    """The rows that break a rule, of one range of ids after another: no statement reads all rows.

    Args:
        pool: of the database.
        ranges: name of the query that returns the last of the next ids behind one.
        name: of the query of the rule, whose first arguments are the bounds of a range.
        arguments: the others.

    Raises:
        PostgresUnavailable: no server.
    """
    behind = 0
    with translated():
        while (last := await pool.fetchval(query(ranges), behind, RANGE)) is not None:
            if rows := await pool.fetch(query(name), behind, last, *arguments):
                yield rows
            behind = last


async def queued(pool: Pool, since: datetime) -> AsyncIterator[list[tuple[str, AttemptId]]]:
    """Types and attempts of the tasks that have been queued since before `since`, a page at a time.

    Raises:
        PostgresUnavailable: no server.
    """
    async for rows in by_cursor(pool, "checks.queued", since):
        yield [(row["type"], AttemptId(row["id"], row["step"], row["attempt"])) for row in rows]
