"""The rules that need both PostgreSQL and Kafka: candidates get time to move.

Each search names candidates by a version that changes when they move. A candidate with the same
version in every search for `SETTLE_S` seconds is an offender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

import asyncpg
from aiokafka import TopicPartition

from penstock.checks.kafka import Topics
from penstock.checks.misplaced import Misplaced
from penstock.checks.queued import Queued
from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rows import GRACE_S
from penstock.core.target import TargetId
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import (
    CALLBACKS,
    CALLBACKS_DIVERTED,
    HEARTBEATS,
    INGESTED,
    STAGE_RESULTS,
    ready,
    service_group,
    workers_group,
)
from penstock.postgres import checks, ingest_positions
from penstock.settings import Platform

# Seconds that a candidate has to move, and between two searches.
SETTLE_S = 10.0
SEARCH_EVERY_S = 1.0

_READ_BY = (
    (HEARTBEATS, "heartbeats"),
    (STAGE_RESULTS, "stages"),
    (CALLBACKS, "callbacks"),
    (CALLBACKS_DIVERTED, "callbacks"),
)

Candidates = dict[Hashable, Offenders]


class InTransit:
    """Finds offenders among what moves between PostgreSQL and Kafka.

    Args:
        settings: for the names of groups.
        pool: of the database.
        topics: of Kafka.
        queued: finds the queued tasks without a record.
        misplaced: finds the positions that do not fit their topics.
    """

    def __init__(
        self,
        settings: Platform,
        pool: asyncpg.Pool[asyncpg.Record],
        topics: Topics,
        queued: Queued,
        misplaced: Misplaced,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._topics = topics
        self._queued = queued
        self._misplaced = misplaced

    async def find(self) -> list[Offenders]:
        """The candidates that have not moved in any search for `SETTLE_S` seconds.

        Raises:
            PostgresUnavailable, KafkaUnavailable: it is unknown.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SETTLE_S
        candidates = await self._search()
        while candidates and loop.time() < deadline_s:
            await asyncio.sleep(SEARCH_EVERY_S)
            again = await self._search()
            candidates = {version: again[version] for version in candidates if version in again}
        return list(candidates.values())

    async def _search(self) -> Candidates:
        return {
            **await self._unreleased(),
            **await self._unheard(),
            **await self._unread(),
            **await self._held(),
            **await self._misplaced.find(),
            **await self._queued.find(),
        }

    async def _unreleased(self) -> Candidates:
        """Tasks that stay ready although their type has no owner, or all its records are read."""
        found: Candidates = {}
        for row in await checks.ready_types(self._pool, GRACE_S):
            topic = ready(row["type"], 1).name
            committed = await self._topics.committed(workers_group(self._settings.prefix, row["type"]))
            unread = await self._topics.unread(topic, committed)
            if row["owned"] and (unread or row["limited"]):
                continue  # they wait for workers, since the window is full, or for the type's limits
            why = f"{topic} has no record left to read" if row["owned"] else "no task-sync releases that type"
            more = f"and {row['tasks'] - 1:,} more of" if row["tasks"] > 1 else "of"
            lacks = f"{more} {row['type']} have been ready for up to {row['age_s']:.0f} s, and {why}"
            written = sum((await self._topics.ends(topic)).values())
            offender = Offender(Rule.UNRELEASED, "task", row["id"], lacks)
            found["unreleased", row["type"], written] = Offenders([offender], row["tasks"])
        return found

    async def _unheard(self) -> Candidates:
        """Tasks whose lease cannot expire, because no heartbeat processor has their partition."""
        rows = await checks.running_by_partition(self._pool, partitions_of(self._settings, HEARTBEATS))
        if not rows:
            return {}
        assigned = await self._topics.assigned(service_group(self._settings.prefix, "heartbeats"))
        if assigned is None:
            return {}
        name = self._settings.prefix + HEARTBEATS.name
        found: Candidates = {}
        for row in rows:
            partition = row["lease_partition"]
            if (name, partition) in assigned:
                continue
            more = f"and {row['tasks'] - 1:,} more have" if row["tasks"] > 1 else "has"
            lacks = f"{more} a lease over {name}/{partition}, which no process reads: is heartbeats running?"
            found["unheard", partition] = Offenders(
                [Offender(Rule.UNHEARD, "task", row["id"], lacks)], row["tasks"]
            )
        return found

    async def _held(self) -> Candidates:
        """Callbacks that stay held although their target is normal."""
        found: Candidates = {}
        for row in await checks.held_targets(self._pool, GRACE_S):
            more = f"and {row['held'] - 1:,} more are" if row["held"] > 1 else "is"
            lacks = f"{more} held for {TargetId(row['namespace'], row['target'])}, which is normal: is callbacks running?"
            found["held", row["namespace"], row["target"], row["seq"]] = Offenders(
                [Offender(Rule.HELD, "callback", row["id"], lacks)], row["held"]
            )
        return found

    async def _unread(self) -> Candidates:
        """Records that have been unread for long, in partitions whose readers make no progress."""
        found: Candidates = {}
        positions = []
        for topic, service in INGESTED:
            name = self._settings.prefix + topic.name
            stored = await ingest_positions.stored_all(self._pool, name)
            ingested = {TopicPartition(name, partition): offset for partition, (offset, _) in stored.items()}
            positions.append((topic, service, ingested))
        for topic, service in _READ_BY:
            group = service_group(self._settings.prefix, service)
            positions.append((topic, service, await self._topics.committed(group)))
        for topic, service, committed in positions:
            unread = await self._topics.unread(topic.name, committed)
            for tp in await self._topics.older(unread, GRACE_S):
                stretch = unread[tp]
                lacks = (
                    f"has {stretch.end - stretch.begin:,} records, some for over {GRACE_S:.0f} s, "
                    f"and its reader makes no progress: is {service} running?"
                )
                offender = Offender(Rule.UNREAD, "topic", f"{tp.topic}/{tp.partition}", lacks)
                found["unread", tp, stretch.begin] = Offenders([offender], 1)
        return found
