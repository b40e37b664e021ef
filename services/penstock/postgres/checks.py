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


async def fetch(pool: Pool, name: str, /, *arguments: Any, **named: Any) -> list[asyncpg.Record]:
    """The rows of a statement; a rule's first argument is how many of them.

    Raises:
        PostgresUnavailable: no server; of a repair, perhaps nothing was changed.
    """
    return await queries.fetch(pool, name, *arguments, **named)


async def counts(pool: Pool, name: str) -> dict[str, int]:
    """The numbers of a statement with two columns, by the first column.

    Raises:
        PostgresUnavailable: no server.
    """
    return {row[0]: row[1] for row in await fetch(pool, name)}


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


async def queued(pool: Pool, since: datetime) -> AsyncIterator[list[tuple[str, AttemptId]]]:
    """Types and attempts of the tasks that have been queued since before `since`, a page at a time.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            cursor = await connection.cursor(query("checks.queued"), since)
            while rows := await cursor.fetch(PAGE):
                yield [(row["type"], AttemptId(row["id"], row["step"], row["attempt"])) for row in rows]
