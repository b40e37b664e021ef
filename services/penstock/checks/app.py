"""The check itself: what PostgreSQL says, compared with what is on Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition

from penstock.contracts.inbound import decode_heartbeat, decode_results
from penstock.contracts.ready import ReadyTask
from penstock.core.leases import Key
from penstock.errors import Invalid
from penstock.kafka.connection import admin_client, make_consumer, running, translated
from penstock.kafka.topics import HEARTBEATS, STAGE_RESULTS, ready, service_group, workers_group
from penstock.postgres.connection import open_pool
from penstock.postgres.connection import translated as postgres_translated
from penstock.postgres.queries import query
from penstock.settings import Platform

# A timer may be this late before nobody can be said to watch it.
GRACE_S = 60.0
# How long a task between two places is given to arrive, and how often it is looked for meanwhile.
SETTLE_S = 10.0
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Offender:
    """Something in limbo.

    Attributes:
        what: "task", "release", "event" or "callback".
        id: its id.
        lacks: one sentence.
    """

    what: str
    id: int | str
    lacks: str


@dataclass(slots=True)
class Report:
    """What a check found.

    Attributes:
        tasks: how many are in which state.
        callbacks: likewise.
        offenders: empty when the invariant holds.
    """

    tasks: dict[str, int] = field(default_factory=dict)
    callbacks: dict[str, int] = field(default_factory=dict)
    offenders: list[Offender] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether the invariant holds."""
        return not self.offenders

    def to_wire(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "clean": self.clean,
            "tasks": self.tasks,
            "callbacks": self.callbacks,
            "offenders": [{"what": o.what, "id": o.id, "lacks": o.lacks} for o in self.offenders],
        }


async def check(settings: Platform) -> Report:
    """Checks the invariant on a live system; takes up to `SETTLE_S` seconds more when something is on its way.

    Raises:
        PostgresUnavailable, KafkaUnavailable: it could not be checked.
    """
    async with (
        open_pool(settings.postgres, "check", size=1) as pool,
        running(make_consumer(settings, None)) as consumer,
    ):
        report = Report()
        with postgres_translated():
            rows = await pool.fetch(query("checks.states"))
            report.tasks = {row["state"]: row["tasks"] for row in rows}
            rows = await pool.fetch(query("checks.callback_states"))
            report.callbacks = {row["state"]: row["callbacks"] for row in rows}
            report.offenders += await _timers(pool)
        report.offenders += await _ready(settings, pool, consumer)
        report.offenders += await _queued(settings, pool, consumer)
        return report


async def _timers(pool: asyncpg.Pool[asyncpg.Record]) -> list[Offender]:
    kinds: Sequence[tuple[str, str, float, Callable[[asyncpg.Record], str]]] = (
        ("overdue", "task", GRACE_S, lambda r: f"was due {r['late_s']:.0f} s ago: is task-sync running?"),
        (
            "unwatched",
            "task",
            HEARTBEATS.partitions,
            lambda r: (
                f"is running on {r['worker']}, heard over partition {r['lease_partition']}: nobody watches that"
            ),
        ),
        (
            "stuck_releases",
            "release",
            GRACE_S,
            lambda r: f"{r['tasks']} tasks of {r['type']} not confirmed by Kafka",
        ),
        (
            "stuck_events",
            "event",
            GRACE_S,
            lambda r: f"{r['events']} events not published: is stages running?",
        ),
        (
            "stuck_callbacks",
            "callback",
            GRACE_S,
            lambda r: f"overdue to {r['target']}: is callbacks running?",
        ),
    )
    found = []
    for name, what, argument, lacks in kinds:
        rows = await pool.fetch(query(f"checks.{name}"), argument)
        found += [Offender(what, row["id"], lacks(row)) for row in rows]
    return found


async def _ready(
    settings: Platform, pool: asyncpg.Pool[asyncpg.Record], consumer: AIOKafkaConsumer
) -> list[Offender]:
    """Tasks that have been ready for long although the workers have read everything there is for them."""
    with postgres_translated():
        rows = await pool.fetch(query("checks.ready"), GRACE_S)
    found = []
    for row in rows:
        topic, group = ready(row["type"], 1).name, workers_group(settings.prefix, row["type"])
        if not await _unread(settings, consumer, settings.prefix + topic, group):
            lacks = (
                f"and {row['tasks'] - 1:,} more of {row['type']} have been ready for up to {row['age_s']:.0f} s, "
                f"and {topic} has no record left to read: is task-sync running?"
            )
            found.append(Offender("task", row["id"], lacks))
    return found


async def _queued(
    settings: Platform, pool: asyncpg.Pool[asyncpg.Record], consumer: AIOKafkaConsumer
) -> list[Offender]:
    """Queued tasks with neither a record on Kafka that somebody will still read, nor anybody who claimed them."""
    suspects: dict[Key, str] | None = None
    deadline_s = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        with postgres_translated():
            rows = await pool.fetch(query("checks.queued"))
        queued: dict[Key, str] = {(row["id"], row["step"], row["attempt"]): row["type"] for row in rows}
        if suspects is not None:
            queued = {key: name for key, name in queued.items() if key in suspects}
        if not queued:
            return []
        carried = await _carried(settings, consumer, set(queued.values()))
        suspects = {key: name for key, name in queued.items() if key not in carried}
        if not suspects or asyncio.get_running_loop().time() > deadline_s:
            return [
                Offender("task", key[0], f"is queued, but ready.{name} has no record of it left to read")
                for key, name in sorted(suspects.items())
            ]
        await asyncio.sleep(LOOK_EVERY_S)


async def _carried(settings: Platform, consumer: AIOKafkaConsumer, types: Iterable[str]) -> set[Key]:
    """The attempts named in records that somebody will still read: ready, claimed, or reported."""
    sources: list[tuple[str, str, Callable[[bytes], Iterable[Key]]]] = [
        (HEARTBEATS.name, service_group(settings.prefix, "heartbeats"), lambda v: decode_heartbeat(v).tasks),
        (STAGE_RESULTS.name, service_group(settings.prefix, "stages"), _reported),
    ]
    sources += [(ready(name, 1).name, workers_group(settings.prefix, name), _released) for name in types]
    carried: set[Key] = set()
    for topic, group, keys_of in sources:
        for value in await _unread(settings, consumer, settings.prefix + topic, group):
            # A record that breaks its contract carries nothing: whoever reads it will park it.
            with suppress(Invalid):
                carried.update(keys_of(value))
    return carried


def _released(value: bytes) -> Iterable[Key]:
    fence = ReadyTask.decode(value).fence
    return [(fence.id, fence.step, fence.attempt)]


def _reported(value: bytes) -> Iterable[Key]:
    _worker, results, _faults = decode_results(value)
    return [(result.fence.id, result.fence.step, result.fence.attempt) for result in results]


async def _unread(settings: Platform, consumer: AIOKafkaConsumer, topic: str, group: str) -> list[bytes]:
    """Everything in a topic that its group has not committed yet."""
    with translated():
        # An unknown topic has nothing unread; asking the consumer would wait for it to be made.
        async with admin_client(settings) as admin:
            if topic not in await admin.list_topics():
                return []
            committed = await admin.list_consumer_group_offsets(group)
            described = await admin.describe_topics([topic])
        partitions = [TopicPartition(topic, part["partition"]) for part in described[0]["partitions"]]
        consumer.assign(partitions)
        begins = await consumer.beginning_offsets(partitions)
        ends = await consumer.end_offsets(partitions)
        remaining: dict[TopicPartition, int] = {}
        for tp in partitions:
            begin = begins[tp]
            if tp in committed and committed[tp].offset >= 0:
                begin = max(begin, committed[tp].offset)
            if begin < ends[tp]:
                remaining[tp] = ends[tp]
                consumer.seek(tp, begin)
            else:
                consumer.pause(tp)
        found: list[bytes] = []
        while remaining:
            for tp, records in (await consumer.getmany(*remaining, timeout_ms=500)).items():
                found += [record.value or b"" for record in records if record.offset < ends[tp]]
            for tp in list(remaining):
                if await consumer.position(tp) >= remaining[tp]:
                    del remaining[tp]
    return found
