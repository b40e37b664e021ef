"""Finds tasks that Kafka names and the database does not have: the database went back.

A standby that lagged was promoted, or a backup was restored. The tasks that were acknowledged in
between are lost, and their clients must submit them again. It is no offender: nothing can be
repaired. Tasks that were never released have no record, so the number is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable

import asyncpg
import orjson

from penstock.checks.kafka import Topics
from penstock.contracts.ready import ReadyTask
from penstock.errors import Invalid
from penstock.kafka.topology.topics import EVENTS, ready
from penstock.postgres import checks

# The newest records of a partition that are read, if they are not older than this. Finished tasks
# are in the history for longer.
MOST_RECORDS = 1_000
AGE_S = 24 * 3600.0
# Seconds in which a topic must be read; what was read by then counts.
READ_S = 10.0


async def missing_tasks(pool: asyncpg.Pool[asyncpg.Record], topics: Topics) -> list[int]:
    """Ids of tasks that recent events and ready records name, and that the database does not have.

    Raises:
        PostgresUnavailable, KafkaUnavailable: it is unknown.
    """
    named: set[int] = set()
    for topic in [EVENTS, *(ready(name, 1) for (name,) in await checks.fetch(pool, "checks.type_names"))]:
        recent = await topics.newest(topic.name, MOST_RECORDS, AGE_S)
        try:
            async for value in topics.values(recent, READ_S):
                named.update(_ended(value) if topic is EVENTS else _released(value))
        except TimeoutError:
            continue
    return [row["id"] for row in await checks.fetch(pool, "checks.missing", sorted(named))]


def _ended(value: bytes) -> Iterable[int]:
    try:
        found = orjson.loads(value)["task"]["id"]
    except (KeyError, TypeError, ValueError):
        return
    if isinstance(found, int):
        yield found


def _released(value: bytes) -> Iterable[int]:
    try:
        yield ReadyTask.decode(value).fence.id
    except Invalid:
        return
