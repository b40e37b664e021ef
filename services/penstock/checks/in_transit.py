"""The rules that need both PostgreSQL and Kafka: candidates get time to move.

Each search names candidates by a version that changes when they move. A candidate with the same
version in every search for `SETTLE_S` seconds is an offender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiokafka import TopicPartition

from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rule import GRACE_S, Candidates, Check, Writers
from penstock.core.target import TargetId
from penstock.kafka.topology.services import INGESTED, PROCESSING_GROUPS
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import HEARTBEATS, ready, service_group, workers_group
from penstock.postgres import checks, ingest_positions
from penstock.postgres.checks import BATCH, MOST_COUNTED
from penstock.postgres.targets import target_columns

# Seconds that a candidate has to move, and between two searches.
SETTLE_S = 10.0
SEARCH_EVERY_S = 1.0


async def settled(searches: Iterable[Check]) -> dict[Check, Candidates]:
    """The candidates of each rule that have not moved in any search for `SETTLE_S` seconds.

    Raises:
        PostgresUnavailable, KafkaUnavailable: it is unknown.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + SETTLE_S
    candidates = {search: await search.find() for search in searches}
    while any(candidates.values()) and loop.time() < deadline_s:
        await asyncio.sleep(SEARCH_EVERY_S)
        for search, before in candidates.items():
            again = await search.find()
            candidates[search] = {version: again[version] for version in before if version in again}
    return candidates


class Unreleased(Check):
    """Tasks that stay ready although their type has no owner, or all its records are read.

    The owner of the type is notified once more.
    """

    rule, moves = Rule.UNRELEASED, True

    async def find(self) -> Candidates:
        """See `Check`."""
        found: Candidates = {}
        topics = self.system.topics
        # `owned`: a task-sync owns the type. `limited`: limits of the type may explain the wait.
        for row in await checks.fetch(self.system.pool, "checks.ready", GRACE_S, MOST_COUNTED):
            topic = ready(row["type"], 1).name
            committed = await topics.committed(workers_group(self.system.settings.prefix, row["type"]))
            unread = await topics.unread(topic, committed)
            if row["owned"] and (unread or row["limited"]):
                continue  # they wait for workers, since the window is full, or for the type's limits
            why = f"{topic} has no record left to read" if row["owned"] else "no task-sync releases that type"
            more = f"and {row['tasks'] - 1:,} more of" if row["tasks"] > 1 else "of"
            lacks = f"{more} {row['type']} have been ready for up to {row['age_s']:.0f} s, and {why}"
            written = sum((await topics.ends(topic)).values())
            offender = Offender(self.rule, "task", row["id"], lacks)
            found[row["type"], written] = Offenders([offender], row["tasks"])
        return found

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        rows = await checks.fetch(self.system.pool, "checks.ready", GRACE_S, MOST_COUNTED)
        owned = [row for row in rows if row["owned"]]
        await checks.fetch(self.system.pool, "checks.wake", [row["type"] for row in owned])
        return sum(row["tasks"] for row in owned)


class Unheard(Check):
    """Tasks whose lease cannot expire, because no heartbeat processor reads their partition.

    They stay until one does.
    """

    rule, moves = Rule.UNHEARD, True

    async def find(self) -> Candidates:
        """See `Check`."""
        settings = self.system.settings
        partitions = partitions_of(settings, HEARTBEATS)
        rows = await checks.fetch(self.system.pool, "checks.running", partitions, MOST_COUNTED)
        if not rows:
            return {}
        assigned = await self.system.topics.assigned(service_group(settings.prefix, "heartbeats"))
        if assigned is None:
            return {}
        name = settings.prefix + HEARTBEATS.name
        found: Candidates = {}
        for row in rows:
            partition = row["lease_partition"]
            if (name, partition) in assigned:
                continue
            more = f"and {row['tasks'] - 1:,} more have" if row["tasks"] > 1 else "has"
            lacks = f"{more} a lease over {name}/{partition}, which no process reads: is heartbeats running?"
            found[partition] = Offenders([Offender(self.rule, "task", row["id"], lacks)], row["tasks"])
        return found


class Held(Check):
    """Callbacks that stay held although their target is normal. They become due again."""

    rule, moves = Rule.HELD, True

    async def find(self) -> Candidates:
        """See `Check`."""
        found: Candidates = {}
        for row in await checks.fetch(self.system.pool, "checks.held", GRACE_S, MOST_COUNTED):
            more = f"and {row['held'] - 1:,} more are" if row["held"] > 1 else "is"
            lacks = f"{more} held for {TargetId(row['namespace'], row['target'])}, which is normal: is callbacks running?"
            found[row["namespace"], row["target"], row["seq"]] = Offenders(
                [Offender(self.rule, "callback", row["id"], lacks)], row["held"]
            )
        return found

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        rows = await checks.fetch(self.system.pool, "checks.held", GRACE_S, MOST_COUNTED)
        targets = target_columns([TargetId(row["namespace"], row["target"]) for row in rows])
        return await checks.repeat(self.system.pool, "checks.requeue_held", BATCH, *targets)


class Unread(Check):
    """Records that are unread for long, and whose readers make no progress. They stay."""

    rule, moves = Rule.UNREAD, True

    async def find(self) -> Candidates:
        """See `Check`."""
        found: Candidates = {}
        prefix, topics = self.system.settings.prefix, self.system.topics
        positions = []
        for topic, service in INGESTED:
            name = prefix + topic.name
            stored = await ingest_positions.stored_all(self.system.pool, name)
            ingested = {TopicPartition(name, partition): offset for partition, (offset, _) in stored.items()}
            positions.append((topic, service, ingested))
        for group, service, read in PROCESSING_GROUPS:
            committed = await topics.committed(service_group(prefix, group))
            positions += [(topic, service, committed) for topic in read]
        for topic, service, committed in positions:
            unread = await topics.unread(topic.name, committed)
            for tp in await topics.older(unread, GRACE_S):
                stretch = unread[tp]
                lacks = (
                    f"has {stretch.end - stretch.begin:,} records, some for over {GRACE_S:.0f} s, "
                    f"and its reader makes no progress: is {service} running?"
                )
                offender = Offender(self.rule, "topic", f"{tp.topic}/{tp.partition}", lacks)
                found[tp, stretch.begin] = Offenders([offender], 1)
        return found
