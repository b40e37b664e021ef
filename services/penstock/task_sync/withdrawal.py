"""Withdraws the records of tasks that wait behind a busy worker.

It does so while another worker has room, or a more urgent task waits behind them:
`core.ready_partitions` decides. For each partition of a busy worker the records that no worker has
taken are read. One statement makes their tasks ready, each as a new attempt, so that the fence
rejects a worker that takes an old record meanwhile. Then the records are deleted, and a marker is
written. A crash between the steps leaves records that the fence makes harmless.

The release loop goes on meanwhile, also for the same type. A withdrawal ends when the ownership is
lost, and a type is transferred only when none is under way.

When in doubt, a record stays: while Kafka does not answer, while another transaction locks the
task, and where task-sync may not read or delete records of ready topics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from penstock.contracts.ready import MARKER
from penstock.core.attempt import AttemptId
from penstock.core.ready_partitions import Plan
from penstock.errors import KafkaRefused, KafkaUnavailable, RecordsRefused
from penstock.kafka.client.connection import translated
from penstock.kafka.client.records import delete_before, read_within, ready_task
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.task_sync.background import Background
from penstock.task_sync.lag_poller import LagPoller
from penstock.task_sync.ready_topics import ReadyTopic
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Most records of one partition that one step withdraws.
LIMIT = 1_000
# Seconds in which they must be read, and types whose records are read at a time.
READ_S = 2.0
READS = 4
# Seconds after which a type is tried again whose records Kafka refuses to read or delete.
REFUSED_S = 300.0


class Withdrawal(Background):
    """Withdraws records of owned types, each type in a task of its own, beside the release loop.

    Args:
        settings: of the service.
        session: the owner of the types.
        producer: acks=all.
        admin: deletes records.
        lag_poller: reads the workers' offsets.
        on_end: called when the withdrawal of a type has ended.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        session: Session,
        producer: AIOKafkaProducer,
        admin: AIOKafkaAdminClient,
        lag_poller: LagPoller,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(on_end)
        self._settings = settings
        self._session = session
        self._producer = producer
        self._admin = admin
        self._lag_poller = lag_poller
        self._on_end = on_end
        self._reads = asyncio.Semaphore(READS)
        self._permitted = False
        # Until when a type is left alone whose records Kafka refuses to read or delete.
        self._refused_until_s: dict[str, float] = {}

    def progress(self) -> dict[str, Hashable]:
        """The withdrawals under way, for the stall detector."""
        conflicts = self._session.lock_conflicts
        return {
            f"withdrawing records of {name}": (task.get_name(), conflicts)
            for name, task in self._running.items()
        }

    def step(self, topic: ReadyTopic) -> None:
        """Begins what is to be done now, right after a poll of the topic."""
        name = topic.type.name
        now_s = asyncio.get_running_loop().time()
        if name in self._running or now_s < self._refused_until_s.get(name, now_s):
            return
        plan = topic.partitions.plan(now_s, more_ready=topic.may_have_ready, first_ready=topic.first_ready)
        if plan:
            topic.poll_interval_s = self._settings.lag_poll_s
            self.start(name, self._run(topic, plan)).add_done_callback(lambda _task: self._on_end())

    async def _run(self, topic: ReadyTopic, plan: Plan) -> None:
        try:
            for number in plan.probe:
                await self._mark(topic, number, withdrawn=False)
            if plan.withdraw:
                await self._withdraw(topic, plan.withdraw)
        except KafkaUnavailable as error:
            log.info(
                "Records behind a busy worker cannot be withdrawn now",
                extra={"event": "withdrawal_delayed", "task_type": topic.type.name, "error": error},
            )
        except (KafkaRefused, RecordsRefused) as error:
            self._refused_until_s[topic.type.name] = asyncio.get_running_loop().time() + REFUSED_S
            log.warning(
                "Records behind busy workers stay there: Kafka refuses to read or delete them",
                extra={"event": "withdrawal_refused", "task_type": topic.type.name, "error": error},
            )

    async def _withdraw(self, topic: ReadyTopic, numbers: Sequence[int]) -> None:
        starts = {TopicPartition(topic.topic, number): topic.partitions[number].taken for number in numbers}
        ends = {number: topic.partitions[number].end for number in numbers}
        if not self._permitted:
            # Deletes nothing, and is refused before any task is moved.
            await delete_before(self._admin, dict.fromkeys(starts, 0))
            self._permitted = True
        async with self._reads:
            unread = await read_within(self._settings, starts, LIMIT, within_s=READ_S)
        # Again: the worker may have taken some meanwhile.
        await self._lag_poller.poll(topic)
        attempts = {
            tp: [
                (offset, attempt_id)
                for offset, attempt_id in _attempts(topic.type.name, records)
                if offset >= topic.partitions[tp.partition].taken
            ]
            for tp, records in unread.items()
        }
        wanted = [attempt_id for found in attempts.values() for _offset, attempt_id in found]
        moved, locked = await release.withdraw(self._session, wanted) if wanted else (set(), set())
        topic.window.discard(moved)
        topic.withdrawn += len(moved)
        topic.may_have_ready = topic.may_have_ready or bool(moved)
        if moved:
            log.info(
                "Tasks behind a busy worker are ready again",
                extra={
                    "event": "tasks_withdrawn",
                    "task_type": topic.type.name,
                    "tasks": len(moved),
                    "partitions": sorted(tp.partition for tp, found in attempts.items() if found),
                },
            )
        for tp, records in unread.items():
            kept = [offset for offset, attempt_id in attempts[tp] if attempt_id in locked]
            await self._delete(topic, tp, records, kept, ends[tp.partition], has_tasks=bool(attempts[tp]))

    async def _delete(
        self,
        topic: ReadyTopic,
        tp: TopicPartition,
        records: Sequence[Any],
        kept: Sequence[int],
        end_before: int,
        *,
        has_tasks: bool,
    ) -> None:
        """Deletes the records before those that are kept, and lets a marker follow."""
        number = tp.partition
        # Otherwise the release loop may have written records behind those that were read.
        unchanged = topic.partitions[number].end == end_before
        if not records:
            if unchanged:
                # Fewer records than were believed to be there.
                topic.partitions.correct({number: topic.partitions[number].taken})
            return
        last = records[-1].offset
        # A marker that is alone stays: the worker has one to take.
        end = min(kept, default=last + 1 if has_tasks else last)
        self._session.ensure()
        await delete_before(self._admin, {tp: end})
        topic.begins[number] = max(end, topic.begins.get(number, 0))
        topic.partitions.withdraw(number, end)
        if not has_tasks and unchanged:
            topic.partitions.find_marker(number, last + 1, asyncio.get_running_loop().time())
        elif has_tasks and not kept and len(records) < LIMIT:
            await self._mark(topic, number, withdrawn=True)

    async def _mark(self, topic: ReadyTopic, number: int, *, withdrawn: bool) -> None:
        self._session.ensure()
        end = topic.partitions[number].end
        with translated():
            written = await self._producer.send_and_wait(topic.topic, MARKER, partition=number)
        now_s, behind = asyncio.get_running_loop().time(), topic.partitions[number].end - end
        topic.partitions.add_marker(number, written.offset, now_s, behind=behind, withdrawn=withdrawn)


def _attempts(type_name: str, records: Sequence[Any]) -> list[tuple[int, AttemptId]]:
    """Offset and attempt of each record of a task."""
    return [
        (record.offset, task.fence.attempt_id)
        for record in records
        if (task := ready_task(record, type_name)) is not None
    ]
