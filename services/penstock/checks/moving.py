"""What only PostgreSQL and Kafka together can tell, by looking until it has had time to move.

Each look names what is suspect by a key that changes when the thing moves: what has the same key at every look for
`SETTLE_S` seconds is an offender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

import asyncpg
from aiokafka import TopicPartition

from penstock.checks.kafka import Topics
from penstock.checks.queued import Queued
from penstock.checks.report import Found, Offender, Rule
from penstock.checks.rows import GRACE_S
from penstock.core.target import TargetId
from penstock.kafka.declared import partitions_of
from penstock.kafka.topics import (
    CALLBACKS,
    CALLBACKS_DIVERTED,
    HEARTBEATS,
    STAGE_RESULTS,
    SUBMITTED,
    ready,
    service_group,
    workers_group,
)
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.settings import Platform

# How long what is between two places is given to arrive, and how often it is looked for meanwhile, in seconds.
SETTLE_S = 10.0
LOOK_EVERY_S = 1.0

_READ_BY = (
    (HEARTBEATS, "heartbeats"),
    (STAGE_RESULTS, "stages"),
    (CALLBACKS, "callbacks"),
    (CALLBACKS_DIVERTED, "callbacks"),
)

Suspects = dict[Hashable, Found]


class Moving:
    """All that moves.

    Args:
        settings: for the names of groups.
        pool: of the database.
        topics: of Kafka.
        queued: the tasks that should have a record.
    """

    def __init__(
        self, settings: Platform, pool: asyncpg.Pool[asyncpg.Record], topics: Topics, queued: Queued
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._topics = topics
        self._queued = queued

    async def settle(self) -> list[Found]:
        """What is suspect at every look until it has had time to move.

        Raises:
            PostgresUnavailable, KafkaUnavailable: it cannot be told.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SETTLE_S
        suspects = await self._look()
        while suspects and loop.time() < deadline_s:
            await asyncio.sleep(LOOK_EVERY_S)
            again = await self._look()
            suspects = {key: again[key] for key in suspects if key in again}
        return list(suspects.values())

    async def _look(self) -> Suspects:
        return {
            **await self._unreleased(),
            **await self._unheard(),
            **await self._unread(),
            **await self._held(),
            **await self._queued.look(),
        }

    async def _unreleased(self) -> Suspects:
        """Tasks that are ready for long although nobody opens their gate, or all that was let through is read."""
        with translated():
            rows = await self._pool.fetch(query("checks.ready"), GRACE_S)
        found: Suspects = {}
        for row in rows:
            topic = ready(row["type"], 1).name
            committed = await self._topics.committed(workers_group(self._settings.prefix, row["type"]))
            unread = await self._topics.unread(topic, committed)
            if row["owned"] and (unread or row["limited"]):
                continue  # they wait for workers, since the window is full, or for what the type's limits say
            why = f"{topic} has no record left to read" if row["owned"] else "no task-sync releases that type"
            more = f"and {row['tasks'] - 1:,} more of" if row["tasks"] > 1 else "of"
            lacks = f"{more} {row['type']} have been ready for up to {row['age_s']:.0f} s, and {why}"
            written = sum((await self._topics.ends(topic)).values())
            offender = Offender(Rule.UNRELEASED, "task", row["id"], lacks)
            found["unreleased", row["type"], written] = Found([offender], row["tasks"])
        return found

    async def _unheard(self) -> Suspects:
        """Tasks whose lease nobody can end: no heartbeat processor has the partition they are heard over."""
        with translated():
            rows = await self._pool.fetch(query("checks.running"), partitions_of(self._settings, HEARTBEATS))
        if not rows:
            return {}
        watched = await self._topics.read_by_somebody(service_group(self._settings.prefix, "heartbeats"))
        if watched is None:
            return {}
        name = self._settings.prefix + HEARTBEATS.name
        found: Suspects = {}
        for row in rows:
            partition = row["lease_partition"]
            if (name, partition) in watched:
                continue
            more = f"and {row['tasks'] - 1:,} more are" if row["tasks"] > 1 else "is"
            lacks = f"{more} heard over {name}/{partition}, which nobody reads: is heartbeats running?"
            found["unheard", partition] = Found(
                [Offender(Rule.UNHEARD, "task", row["id"], lacks)], row["tasks"]
            )
        return found

    async def _held(self) -> Suspects:
        """Callbacks that are held although their target is normal, and of which nobody lets any go."""
        with translated():
            rows = await self._pool.fetch(query("checks.held"), GRACE_S)
        found: Suspects = {}
        for row in rows:
            more = f"and {row['held'] - 1:,} more are" if row["held"] > 1 else "is"
            lacks = f"{more} held for {TargetId(row['namespace'], row['target'])}, which is normal: is callbacks running?"
            found["held", row["namespace"], row["target"], row["seq"]] = Found(
                [Offender(Rule.HELD, "callback", row["id"], lacks)], row["held"]
            )
        return found

    async def _unread(self) -> Suspects:
        """Records that carry something on and lie unread for long, in partitions whose readers stand still."""
        submitted = self._settings.prefix + SUBMITTED.name
        with translated():
            rows = await self._pool.fetch(query("checks.ingested"), submitted)
        found: Suspects = {}
        ingested = {TopicPartition(submitted, row["partition"]): row["next_offset"] for row in rows}
        positions = [(SUBMITTED, "task-sync", ingested)]
        for topic, service in _READ_BY:
            group = service_group(self._settings.prefix, service)
            positions.append((topic, service, await self._topics.committed(group)))
        for topic, service, committed in positions:
            unread = await self._topics.unread(topic.name, committed)
            for tp in await self._topics.stale(unread, GRACE_S):
                stretch = unread[tp]
                lacks = (
                    f"has {stretch.end - stretch.begin:,} records, some for over {GRACE_S:.0f} s, "
                    f"and nobody reads on: is {service} running?"
                )
                offender = Offender(Rule.UNREAD, "topic", f"{tp.topic}/{tp.partition}", lacks)
                found["unread", tp, stretch.begin] = Found([offender], 1)
        return found
