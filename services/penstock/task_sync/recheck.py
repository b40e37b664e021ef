"""Recheck: finds queued tasks whose record is lost, and makes them ready again.

A record is lost with its topic (deleted and created again, or a new Kafka with an old PostgreSQL)
or after the topic's retention. Every `recheck_s` seconds a proof begins for each owned type with
queued tasks; it is checked four times until the next one. `proof` explains what the proof relies
on. Without queued tasks, a check queries neither Kafka nor PostgreSQL.

When in doubt, and while Kafka or PostgreSQL is unavailable, no task is made ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import OffsetAndMetadata

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import MARKER
from penstock.contracts.result import encode_results
from penstock.contracts.task_type import TaskType
from penstock.errors import KafkaRefused, KafkaUnavailable, Unavailable
from penstock.kafka.client import positions
from penstock.kafka.client.connection import translated
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import (
    HEARTBEATS,
    STAGE_RESULTS,
    Topic,
    ready,
    service_group,
    workers_group,
)
from penstock.postgres import release
from penstock.task_sync.owned_topics import OwnedTopics
from penstock.task_sync.proof import Offsets, PartitionOffsets, Proof, Station, replaced
from penstock.task_sync.queued_cutoffs import QueuedCutoffs
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Checks of a proof until the next one begins: one that begins it, and one for each station.
CHECKS = 4
# Seconds in which the offsets of topics must be read, all together or one alone.
READ_S = 3.0

_WRITER = "task-sync"
# Records without effect, which make readers commit past lost records. Workers skip a ready record
# that is no task.
_MARKERS = {
    Station.READY: MARKER,
    Station.HEARTBEATS: Heartbeat(Kind.RELEASE, _WRITER, 0, []).encode(),
    Station.RESULTS: encode_results(_WRITER, []),
}
_SERVICES = {Station.HEARTBEATS: (HEARTBEATS, "heartbeats"), Station.RESULTS: (STAGE_RESULTS, "stages")}


@dataclass(slots=True)
class Case:
    """The proof of one type.

    Attributes:
        type: the type.
        cutoff: Kafka had the ready records of all tasks that were queued before this transaction.
        proof: its progress.
    """

    type: TaskType
    cutoff: str
    proof: Proof


@dataclass(slots=True)
class _TypeState:
    """The state of a type from one proof to the next.

    Attributes:
        next_s: when the next proof begins, on the loop's clock.
        ends: end offsets of the ready topic at the last proof, by partition.
        topic_id: of the ready topic at the last proof; None when it is not known.
        replaced: the ready topic was replaced, and has not been read since.
    """

    next_s: float
    ends: dict[int, int] = field(default_factory=dict)
    topic_id: str | None = None
    replaced: bool = False


class Recheck:
    """The loop that runs alongside the release loop.

    Args:
        settings: of the service.
        pool: of the database.
        producer: acks=all.
        admin: reads the groups' committed offsets.
        topic_offsets: reads the beginning and end offsets of topics.
        topics: of the types that this process owns.
        cutoffs: of their queued tasks.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
        admin: AIOKafkaAdminClient,
        topic_offsets: AIOKafkaConsumer,
        topics: OwnedTopics,
        cutoffs: QueuedCutoffs,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._producer = producer
        self._admin = admin
        self._topic_offsets = topic_offsets
        self._topics = topics
        self._cutoffs = cutoffs
        self._cases: dict[str, Case] = {}
        self._states: dict[str, _TypeState] = {}

    async def run(self) -> None:
        """Checks until cancelled."""
        interval_s = self._settings.recheck_s / CHECKS
        while True:
            if not self._cases:
                # Without a query: no task that this process released may still be queued.
                await self._cutoffs.may_have_queued.wait()
            await asyncio.sleep(interval_s)
            try:
                await self._check()
            except (Unavailable, KafkaRefused) as error:
                log.warning(
                    "Queued tasks cannot be checked for lost records now",
                    extra={"event": "recheck_delayed", "error": error},
                )

    async def _check(self) -> None:
        """Checks every proof, and begins those that are due."""
        due = await self._due()
        # From the last station to the first, so that a proof advances one station a check. Records
        # that were being written at one check are then on their topic at the next.
        await self._check_service(Station.RESULTS)
        await self._check_service(Station.HEARTBEATS)
        await self._check_ready(due)

    async def _due(self) -> dict[str, tuple[TaskType, str]]:
        """Types whose proof is to begin, with their cutoffs."""
        now_s = asyncio.get_running_loop().time()
        due = {}
        for task_type in self._cutoffs.types():
            state = self._states.setdefault(task_type.name, _TypeState(now_s + self._settings.recheck_s))
            if task_type.name not in self._cases and now_s >= state.next_s:
                state.next_s = now_s + self._settings.recheck_s
                due[task_type.name] = task_type
        if not due:
            return {}
        cutoffs = await self._cutoffs.read(list(due))
        return {name: (due[name], cutoff) for name, cutoff in cutoffs.items()}

    async def _check_ready(self, due: Mapping[str, tuple[TaskType, str]]) -> None:
        cases = [case for case in self._cases.values() if case.proof.station is Station.READY]
        types = {case.type.name: case.type for case in cases}
        types |= {name: task_type for name, (task_type, _cutoff) in due.items()}
        if not types:
            return
        topics = {name: ready(name, task_type.partitions) for name, task_type in types.items()}
        await self._create_missing(topics.values())
        offsets = {
            name: await self._read_ready(topic, workers_group(self._settings.prefix, name))
            for name, topic in topics.items()
        }
        passed = []
        for case in cases:
            name, partitions = case.type.name, offsets[case.type.name]
            if partitions is None:
                continue
            if case.proof.shrunk(partitions):
                self._states[name].next_s = 0.0
                del self._cases[name]
            elif case.proof.passed(partitions):
                self._states[name].replaced = False
                passed.append(case)
            else:
                numbers = case.proof.needs_marker(partitions)
                try:
                    async with asyncio.timeout(READ_S):
                        await self._write_markers(topics[name].name, Station.READY, numbers)
                except (TimeoutError, KafkaUnavailable, KafkaRefused) as error:
                    _report_incomplete(topics[name], error)
                else:
                    self._topics.on_markers_written(name, numbers)
        await self._advance(passed, Station.HEARTBEATS)
        for name, (task_type, cutoff) in due.items():
            partitions = offsets[name]
            if partitions is None:
                self._states[name].next_s = 0.0
                continue
            replaced = self._record_ends(name, partitions)
            self._cases[name] = Case(task_type, cutoff, Proof(partitions, replaced=replaced))

    async def _create_missing(self, topics: Iterable[Topic]) -> None:
        """Creates missing topics; the client would wait for them otherwise."""
        with translated():
            existing = set(await self._admin.list_topics())
        missing = [topic for topic in topics if self._settings.prefix + topic.name not in existing]
        for topic in missing:
            # `_read_ready` reports a topic that cannot be created.
            with suppress(KafkaUnavailable, KafkaRefused):
                await create_topics(self._settings, [topic])

    def _record_ends(self, name: str, offsets: PartitionOffsets) -> bool:
        """Whether the ready topic has replaced that of the last proof, and was not read since."""
        state = self._states[name]
        ends = {number: partition.end for number, partition in offsets.items()}
        topic_id = next((partition.topic_id for partition in offsets.values()), None)
        if replaced(state.topic_id, topic_id) or any(
            ends.get(number, 0) < end for number, end in state.ends.items()
        ):
            log.warning(
                "A ready topic was replaced",
                extra={"event": "ready_topic_replaced", "topic": f"{self._settings.prefix}ready.{name}"},
            )
            state.replaced = True
            self._topics.on_topic_replaced(name, ends)
        state.ends, state.topic_id = ends, topic_id
        return state.replaced

    async def _check_service(self, station: Station) -> None:
        cases = [case for case in self._cases.values() if case.proof.station is station]
        if not cases:
            return
        offsets = await self._read_service_offsets(station)
        passed = []
        for case in cases:
            if case.proof.shrunk(offsets):
                # The next proof begins at its usual time.
                del self._cases[case.type.name]
            elif case.proof.passed(offsets):
                passed.append(case)
        waiting = [case for case in cases if case not in passed and case.type.name in self._cases]
        numbers = {number for case in waiting for number in case.proof.needs_marker(offsets)}
        await self._write_markers(_SERVICES[station][0].name, station, numbers)
        if station is Station.HEARTBEATS:
            await self._advance(passed, Station.RESULTS)
            return
        for case in passed:
            del self._cases[case.type.name]
            await self._make_ready(case)

    async def _advance(self, passed: Sequence[Case], station: Station) -> None:
        if passed:
            # Read now: the records that the readers of the station before wrote are before these
            # end offsets.
            offsets = await self._read_service_offsets(station)
            for case in passed:
                case.proof.advance(offsets)

    async def _read_service_offsets(self, station: Station) -> PartitionOffsets:
        topic, service = _SERVICES[station]
        return await self._read_offsets(topic, service_group(self._settings.prefix, service))

    async def _read_ready(self, topic: Topic, group: str) -> PartitionOffsets | None:
        """As `_read_offsets`; None for a topic that does not answer, so that no other waits."""
        try:
            async with asyncio.timeout(READ_S):
                return await self._read_offsets(topic, group)
        except (TimeoutError, KafkaUnavailable, KafkaRefused) as error:
            _report_incomplete(topic, error)
            return None

    async def _read_offsets(self, topic: Topic, group: str) -> PartitionOffsets:
        """The offsets of a topic and of its group."""
        partitions = [
            TopicPartition(self._settings.prefix + topic.name, number)
            for number in range(partitions_of(self._settings, topic))
        ]
        with translated():
            # Committed offsets first: then none of them is beyond an end offset.
            committed = await self._admin.list_consumer_group_offsets(group)
            found = {tp: committed.get(tp) or OffsetAndMetadata(-1, "") for tp in partitions}
            commits = await positions.commits_of_logs(self._topic_offsets, found)
            begins = await self._topic_offsets.beginning_offsets(partitions)
            ends = await self._topic_offsets.end_offsets(partitions)
        return {
            tp.partition: Offsets(commits[tp].offset, begins[tp], ends[tp], commits[tp].topic_id)
            for tp in partitions
        }

    async def _write_markers(self, topic: str, station: Station, numbers: Iterable[int]) -> None:
        for number in sorted(numbers):
            log.info(
                "Writing a marker to a partition without readable records",
                extra={"event": "marker_written", "topic": topic, "partition": number},
            )
            with translated():
                await self._producer.send_and_wait(
                    self._settings.prefix + topic, _MARKERS[station], partition=number
                )

    async def _make_ready(self, case: Case) -> None:
        tasks, limit = 0, self._settings.release_batch
        while True:
            ids = await release.make_lost_ready(self._pool, case.type.name, case.cutoff, limit)
            tasks += len(ids)
            if len(ids) < limit:
                break
        if tasks:
            log.warning(
                "Queued tasks had no record left on Kafka and are ready again",
                extra={"event": "lost_tasks_recovered", "task_type": case.type.name, "tasks": tasks},
            )


def _report_incomplete(topic: Topic, error: Exception) -> None:
    log.warning(
        "Queued tasks of some types cannot be checked for lost records now",
        extra={"event": "recheck_incomplete", "topics": [topic.name], "error": repr(error)},
    )
