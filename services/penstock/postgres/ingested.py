"""What was taken in from the topic `submitted`: offsets in the same transaction as the tasks they became."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from penstock.contracts.submission import Submission
from penstock.errors import SessionLost
from penstock.postgres import tasks
from penstock.postgres.connection import translated
from penstock.postgres.queries import query


async def positions(pool: asyncpg.Pool[asyncpg.Record], topic: str, begin: dict[int, int]) -> dict[int, int]:
    """Where to read on, by partition.

    Args:
        pool: where the offsets are.
        topic: full name of the topic.
        begin: for each partition asked for, where to begin when nothing was ever taken in.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            for partition, offset in begin.items():
                await connection.execute(query("release.ingest_begin"), topic, partition, offset)
            rows = await connection.fetch(query("release.ingested"), topic, list(begin))
    return {row["partition"]: row["next_offset"] for row in rows}


async def take_in(
    pool: asyncpg.Pool[asyncpg.Record],
    submissions: Sequence[Submission],
    *,
    topic: str,
    partition: int,
    first: int,
    following: int,
) -> None:
    """Inserts the tasks of the records from offset `first` up to (not with) `following`, in one transaction.

    Raises:
        SessionLost: another reader has moved on from `first`; nothing was inserted.
        PostgresUnavailable: nothing was inserted.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            moved = await connection.fetchval(
                query("release.ingest_advance"), topic, partition, first, following
            )
            if moved is None:
                raise SessionLost(f"{topic}/{partition} was read on from {first} by another process")
            if submissions:
                await tasks.submit(connection, submissions)
