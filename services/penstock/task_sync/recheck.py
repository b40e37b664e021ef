"""Recheck: finds queued tasks whose record is lost, and makes them ready again.

Records go missing with their topic (deleted and made anew, a new Kafka beside an old PostgreSQL) or when they
outlast its retention. Every `recheck_s` seconds a proof is begun for each owned type that has queued tasks, and
looked at four times until the next; `proof` says what it rests on. With nothing queued nobody is asked anything.

In doubt, also when Kafka or PostgreSQL is away, nothing is released again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import MARK
from penstock.contracts.result import encode_results
from penstock.errors import Unavailable
from penstock.kafka.connection import create_topics, translated
from penstock.kafka.declared import partitions_of
from penstock.kafka.topics import HEARTBEATS, STAGE_RESULTS, Topic, ready, service_group, workers_group
from penstock.postgres import release
from penstock.postgres.types import TaskType
from penstock.task_sync.proof import Offsets, Proof, Seen, Station
from penstock.task_sync.release import Release
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Looks at a proof until the next one is begun: one at which it begins, and one for each station.
LOOKS = 4

_WRITER = "task-sync"
# What says nothing, but is read: so readers commit past what was lost before it. On a ready topic it is no task, and
# workers skip what is none.
_MARKS = {
    Station.READY: MARK,
    Station.HEARTBEATS: Heartbeat(Kind.RELEASE, _WRITER, 0, []).encode(),
    Station.RESULTS: encode_results(_WRITER, []),
}
_SERVICES = {Station.HEARTBEATS: (HEARTBEATS, "heartbeats"), Station.RESULTS: (STAGE_RESULTS, "stages")}


@dataclass(slots=True)
class Case:
    """One type under proof.

    Attributes:
        type: which.
        cut: what was queued before had its record on the ready topic by then.
        proof: how far it is.
    """

    type: TaskType
    cut: datetime
    proof: Proof


@dataclass(slots=True)
class _Memory:
    """What lasts from one proof of a type to the next."""

    next_s: float
    ends: dict[int, int] = field(default_factory=dict)
    replaced: bool = False


class Recheck:
    """The loop beside the gate.

    Args:
        settings: of the service.
        pool: of the database.
        producer: acks=all.
        admin: reads what groups have committed.
        offsets: reads where topics begin and end.
        gate: the types this process owns.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
        admin: AIOKafkaAdminClient,
        offsets: AIOKafkaConsumer,
        gate: Release,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._producer = producer
        self._admin = admin
        self._offsets = offsets
        self._gate = gate
        self._cases: dict[str, Case] = {}
        self._memories: dict[str, _Memory] = {}

    async def run(self) -> None:
        """Looks until cancelled."""
        pace_s = self._settings.recheck_s / LOOKS
        while True:
            if not self._cases:
                # Without a query: the gate knows whether it has released anything that may still be queued.
                await self._gate.some_queued.wait()
            await asyncio.sleep(pace_s)
            try:
                await self._look()
            except Unavailable as error:
                log.warning("cannot tell whether queued tasks have lost their records: %s", error)

    async def _look(self) -> None:
        """One look at every proof, and the first at those that are due."""
        due = await self._due()
        # Backwards, so that each goes on by one station: what was just about to be written is there at the next look.
        await self._look_at_service(Station.RESULTS)
        await self._look_at_service(Station.HEARTBEATS)
        await self._look_at_ready(due)

    async def _due(self) -> dict[str, tuple[TaskType, datetime]]:
        """Types whose proof is to begin, and their cuts."""
        now_s = asyncio.get_running_loop().time()
        due = {}
        for task_type in self._gate.queued_types():
            memory = self._memories.setdefault(task_type.name, _Memory(now_s + self._settings.recheck_s))
            if task_type.name not in self._cases and now_s >= memory.next_s:
                memory.next_s = now_s + self._settings.recheck_s
                due[task_type.name] = task_type
        if not due:
            return {}
        cuts = await self._gate.cuts(list(due))
        return {name: (due[name], cut) for name, cut in cuts.items()}

    async def _look_at_ready(self, due: Mapping[str, tuple[TaskType, datetime]]) -> None:
        cases = [case for case in self._cases.values() if case.proof.station is Station.READY]
        types = {case.type.name: case.type for case in cases}
        types |= {name: task_type for name, (task_type, _cut) in due.items()}
        if not types:
            return
        topics = {name: ready(name, task_type.partitions) for name, task_type in types.items()}
        await self._require(topics.values())
        groups = {topic: workers_group(self._settings.prefix, name) for name, topic in topics.items()}
        seen = await self._see(groups)
        passed = []
        for case in cases:
            name, partitions = case.type.name, seen[topics[case.type.name].name]
            if case.proof.shrunk(partitions):
                self._memories[name].next_s = 0.0
                del self._cases[name]
            elif case.proof.passed(partitions):
                self._memories[name].replaced = False
                passed.append(case)
            else:
                await self._mark(topics[name].name, Station.READY, case.proof.unreadable(partitions))
                self._gate.marked(name, len(case.proof.unreadable(partitions)))
        await self._go_on(passed, Station.HEARTBEATS)
        for name, (task_type, cut) in due.items():
            partitions = seen[topics[name].name]
            replaced = self._remember(name, partitions)
            self._cases[name] = Case(task_type, cut, Proof(partitions, replaced=replaced))

    async def _require(self, topics: Iterable[Topic]) -> None:
        """Makes those that do not exist: they would be waited for."""
        with translated():
            existing = set(await self._admin.list_topics())
        missing = [topic for topic in topics if self._settings.prefix + topic.name not in existing]
        if missing:
            await create_topics(self._settings, missing)

    def _remember(self, name: str, seen: Seen) -> bool:
        """Whether the type's ready topic has replaced the one of its last proofs, and was not read since."""
        memory = self._memories[name]
        ends = {number: offsets.end for number, offsets in seen.items()}
        if any(ends.get(number, 0) < end for number, end in memory.ends.items()):
            log.warning("%sready.%s is another topic than before", self._settings.prefix, name)
            memory.replaced = True
            self._gate.recount(name, sum(ends.values()))
        memory.ends = ends
        return memory.replaced

    async def _look_at_service(self, station: Station) -> None:
        cases = [case for case in self._cases.values() if case.proof.station is station]
        if not cases:
            return
        seen = await self._see_service(station)
        passed = []
        for case in cases:
            if case.proof.shrunk(seen):
                # Begun anew when its time comes.
                del self._cases[case.type.name]
            elif case.proof.passed(seen):
                passed.append(case)
        waiting = [case for case in cases if case not in passed and case.type.name in self._cases]
        unreadable = {number for case in waiting for number in case.proof.unreadable(seen)}
        await self._mark(_SERVICES[station][0].name, station, unreadable)
        if station is Station.HEARTBEATS:
            await self._go_on(passed, Station.RESULTS)
            return
        for case in passed:
            del self._cases[case.type.name]
            await self._release_again(case)

    async def _go_on(self, passed: Sequence[Case], station: Station) -> None:
        if passed:
            # After they have passed: what they have passed wrote here is before these ends.
            seen = await self._see_service(station)
            for case in passed:
                case.proof.go_on(seen)

    async def _see_service(self, station: Station) -> Seen:
        topic, service = _SERVICES[station]
        return (await self._see({topic: service_group(self._settings.prefix, service)}))[topic.name]

    async def _see(self, groups: Mapping[Topic, str]) -> dict[str, Seen]:
        """Looks at topics and at what their readers have committed; by bare name."""
        committed: dict[TopicPartition, int] = {}
        partitions = {
            topic: [
                TopicPartition(self._settings.prefix + topic.name, n)
                for n in range(partitions_of(self._settings, topic))
            ]
            for topic in groups
        }
        everything = [tp for some in partitions.values() for tp in some]
        with translated():
            # First: what was committed is never beyond an end that is read after it.
            for group in groups.values():
                answer = await self._admin.list_consumer_group_offsets(group)
                committed |= {tp: meta.offset for tp, meta in answer.items()}
            begins = await self._offsets.beginning_offsets(everything)
            ends = await self._offsets.end_offsets(everything)
        return {
            topic.name: {tp.partition: Offsets(committed.get(tp, -1), begins[tp], ends[tp]) for tp in some}
            for topic, some in partitions.items()
        }

    async def _mark(self, topic: str, station: Station, numbers: Iterable[int]) -> None:
        for number in sorted(numbers):
            log.info("%s/%d: nothing is left to read: marking where it goes on", topic, number)
            with translated():
                await self._producer.send_and_wait(
                    self._settings.prefix + topic, _MARKS[station], partition=number
                )

    async def _release_again(self, case: Case) -> None:
        found = 0
        limit = self._settings.release_batch
        while True:
            ids = await release.lost(self._pool, case.type.name, case.cut, limit)
            found += len(ids)
            if len(ids) < limit:
                break
        if found:
            log.warning(
                "%s: %d queued tasks had no record left on Kafka: ready again",
                case.type.name,
                found,
                extra={"type": case.type.name},
            )
