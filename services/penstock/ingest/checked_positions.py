"""Checks the stored positions of ingest against the topic, and moves those that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
from aiokafka import TopicPartition

from penstock.core.position import Position
from penstock.kafka.client import positions
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.postgres import ingest_positions


async def checked_positions(
    pool: asyncpg.Pool[asyncpg.Record], offsets: OffsetReader, topic: str, assigned: Sequence[TopicPartition]
) -> dict[TopicPartition, Position]:
    """The position at which to read each partition; PostgreSQL has it now.

    Raises:
        PostgresUnavailable, KafkaUnavailable: it is unknown.
    """
    checked: dict[TopicPartition, Position] = {}
    while left := [tp for tp in assigned if tp not in checked]:
        stored = await ingest_positions.stored(pool, topic, [tp.partition for tp in left])
        starts = await offsets.check(
            {tp: ingest_positions.position_of(stored.get(tp.partition)) for tp in left}
        )
        moves = {tp.partition: (stored.get(tp.partition), start) for tp, start in starts.items()}
        now = await ingest_positions.move(pool, topic, moves)
        # A position that another process moved meanwhile is not checked yet.
        done = {
            tp: start
            for tp, start in starts.items()
            if now[tp.partition] == (start.position.offset, start.position.identity())
        }
        positions.report(done)
        checked |= {tp: start.position for tp, start in done.items()}
    return checked
