"""Positions in the topic `submitted`, written in the transactions that insert its tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock.core.position import Position, Start, StartReason
from penstock.errors import SessionLost
from penstock.postgres.connection import translated
from penstock.postgres.queries import execute, fetch

# A position as it is stored: the next offset, and the identity of its log.
Stored = tuple[int, str | None]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets of a partition from which a batch was read.

    Attributes:
        topic: topic with its prefix.
        partition: number of the partition.
        first: first offset of the batch.
        following: first offset after the batch.
        identity: of the log at `first`, as it is stored.
        following_identity: of the log at `following`.
    """

    topic: str
    partition: int
    first: int
    following: int
    identity: str | None = None
    following_identity: str | None = None


def offset_parameters(source: OffsetRange | None) -> dict[str, Any]:
    """The parameters by which a statement moves the reader's offset: NULL without a source."""
    return {
        "topic": source and source.topic,
        "partition": source and source.partition,
        "first_offset": source and source.first,
        "next_offset": source and source.following,
        "identity": source and source.identity,
        "next_identity": source and source.following_identity,
    }


def offsets_passed(source: OffsetRange | None) -> SessionLost:
    """The error of such a statement that has found another offset."""
    return SessionLost(f"another process reads the partition, and it has passed the offsets of {source}")


async def stored(executor: Any, topic: str, partitions: Collection[int]) -> dict[int, Stored]:
    """The stored positions of partitions; those without one are missing.

    Args:
        executor: a pool or a connection.
        topic: full name of the topic.
        partitions: their numbers.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "release.ingest_offsets", topic, list(partitions))
    return {row["partition"]: (row["next_offset"], row["identity"]) for row in rows}


async def stored_all(executor: Any, topic: str) -> dict[int, Stored]:
    """The stored positions of all partitions that have one.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "checks.ingested", topic)
    return {row["partition"]: (row["next_offset"], row["identity"]) for row in rows}


async def move(
    pool: asyncpg.Pool[asyncpg.Record], topic: str, starts: Mapping[int, tuple[Stored | None, Start]]
) -> dict[int, Stored]:
    """Stores the positions that were checked, and the reason of each that was not valid.

    Args:
        pool: of the database.
        topic: full name of the topic.
        starts: by partition, what was stored and where to continue.

    Returns:
        What is stored now. Another process may have moved a position meanwhile.

    Raises:
        PostgresUnavailable: no server; nothing was moved.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            # In one order, so that two readers cannot deadlock.
            for partition, (before, start) in sorted(starts.items()):
                position = start.position
                if before is None:
                    await execute(
                        connection,
                        "release.insert_ingest_offset",
                        topic=topic,
                        partition=partition,
                        next_offset=position.offset,
                        identity=position.identity(),
                    )
                elif before != (position.offset, position.identity()):
                    await execute(
                        connection,
                        "release.move_ingest_offset",
                        topic=topic,
                        partition=partition,
                        next_offset=position.offset,
                        identity=position.identity(),
                        stored=before[0],
                        stored_identity=before[1],
                        reason=None if start.reason is StartReason.KEPT else start.reason.value,
                        deleted=start.deleted,
                    )
            return await stored(connection, topic, list(starts))


def position_of(found: Stored | None) -> Position | None:
    """The position that is stored; None without one."""
    return None if found is None else Position.from_stored(*found)
