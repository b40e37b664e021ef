"""Offsets of the topic `submitted`, written in the transactions that insert its tasks."""

from __future__ import annotations

import asyncpg

from penstock.postgres.connection import translated
from penstock.postgres.queries import query


async def positions(
    pool: asyncpg.Pool[asyncpg.Record], topic: str, beginnings: dict[int, int]
) -> dict[int, int]:
    """The next offset to read, by partition.

    Args:
        pool: of the database.
        topic: full name of the topic.
        beginnings: the first offset of each partition, for partitions without a stored offset.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            for partition, offset in beginnings.items():
                await connection.execute(query("release.insert_ingest_offset"), topic, partition, offset)
            rows = await connection.fetch(query("release.ingest_offsets"), topic, list(beginnings))
    return {row["partition"]: row["next_offset"] for row in rows}
