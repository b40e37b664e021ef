"""Withdraws the records of tasks that wait behind a busy worker, while another worker has room.

`core.ready_partitions` decides. For each partition of a busy worker the records that no worker has
taken are read. One statement makes their tasks ready, each as a new attempt, so that the fence
rejects a worker that takes an old record meanwhile. Then the records are deleted, and a mark is
written. A crash between the steps leaves records that the fence makes harmless.

When in doubt, a record stays: while Kafka does not answer, while another transaction locks the
task, and where task-sync may not read or delete records of ready topics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from penstock.contracts.ready import MARK, ReadyTask
from penstock.core.attempt import AttemptId
from penstock.core.ready_partitions import Plan
from penstock.errors import InvalidRecord, KafkaRefused, KafkaUnavailable, RecordsRefused
from penstock.kafka.connection import translated
from penstock.kafka.records import delete_before, records_from
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.task_sync.ready_topics import LagPoller, ReadyTopic
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Most records of one partition that one step withdraws.
LIMIT = 1_000
# Seconds in which they must be read: all types wait meanwhile.
READ_S = 2.0


class Withdrawal:
    """Withdraws records of owned types.

    Args:
        settings: of the service.
        session: the owner of the types.
        producer: acks=all.
        admin: deletes records.
        lag_poller: reads the workers' offsets.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        session: Session,
        producer: AIOKafkaProducer,
        admin: AIOKafkaAdminClient,
        lag_poller: LagPoller,
    ) -> None:
        self._settings = settings
        self._session = session
        self._producer = producer
        self._admin = admin
        self._lag_poller = lag_poller
        self._permitted = False
        self._refused = False

    async def step(self, topic: ReadyTopic) -> None:
        """Does what is to be done now, right after a poll of the topic.

        Raises:
            SessionLost: the ownership is lost.
            PostgresUnavailable: perhaps the tasks are ready, and their records are left.
        """
        now_s = asyncio.get_running_loop().time()
        plan = Plan() if self._refused else topic.partitions.plan(now_s, more_ready=topic.may_have_ready)
        if not plan:
            return
        topic.poll_interval_s = self._settings.lag_poll_s
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
            self._refused = True
            log.warning(
                "Records behind busy workers stay there: Kafka refuses to read or delete them",
                extra={"event": "withdrawal_refused", "task_type": topic.type.name, "error": error},
            )

    async def _withdraw(self, topic: ReadyTopic, numbers: Sequence[int]) -> None:
        starts = {TopicPartition(topic.topic, number): topic.partitions[number].taken for number in numbers}
        if not self._permitted:
            # Deletes nothing, and is refused before any task is moved.
            await delete_before(self._admin, dict.fromkeys(starts, 0))
            self._permitted = True
        unread = await records_from(self._settings, starts, LIMIT, within_s=READ_S)
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
                "Tasks behind a busy worker are ready again, because another worker has room",
                extra={
                    "event": "tasks_withdrawn",
                    "task_type": topic.type.name,
                    "tasks": len(moved),
                    "partitions": sorted(tp.partition for tp, found in attempts.items() if found),
                },
            )
        for tp, records in unread.items():
            kept = [offset for offset, attempt_id in attempts[tp] if attempt_id in locked]
            await self._delete(topic, tp, records, kept, has_tasks=bool(attempts[tp]))

    async def _delete(
        self,
        topic: ReadyTopic,
        tp: TopicPartition,
        records: Sequence[Any],
        kept: Sequence[int],
        *,
        has_tasks: bool,
    ) -> None:
        """Deletes the records before those that are kept, and lets a mark follow."""
        number = tp.partition
        if not records:
            # Fewer records than were believed to be there.
            topic.partitions.correct({number: topic.partitions[number].taken})
            return
        last = records[-1].offset
        # A mark that is alone stays: the worker has one to take.
        end = min(kept, default=last + 1 if has_tasks else last)
        await delete_before(self._admin, {tp: end})
        topic.begins[number] = max(end, topic.begins.get(number, 0))
        topic.partitions.withdraw(number, end)
        if not has_tasks:
            topic.partitions.find_mark(number, last + 1, asyncio.get_running_loop().time())
        elif not kept and len(records) < LIMIT:
            await self._mark(topic, number, withdrawn=True)

    async def _mark(self, topic: ReadyTopic, number: int, *, withdrawn: bool) -> None:
        with translated():
            written = await self._producer.send_and_wait(topic.topic, MARK, partition=number)
        now_s = asyncio.get_running_loop().time()
        topic.partitions.add_mark(number, written.offset, now_s, withdrawn=withdrawn)


def _attempts(type_name: str, records: Sequence[Any]) -> list[tuple[int, AttemptId]]:
    """Offset and attempt of each record of a task."""
    found = []
    for record in records:
        try:
            found.append((record.offset, ReadyTask.decode(record.value or b"", type_name).fence.attempt_id))
        except InvalidRecord:
            continue  # a mark, or a record of another program
    return found
