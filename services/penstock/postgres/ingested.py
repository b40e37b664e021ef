"""What was taken in from the topic `submitted`: offsets in the same transaction as the tasks they became."""

from __future__ import annotations

import asyncpg

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
