"""Writes released batches to their ready topics, and awaits confirmation in the background.

The producer takes a batch at once, unless a partition has no leader, or its broker does not answer.
Such a type is written beside the release loop, and gets no further batch until that has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from aiokafka import AIOKafkaProducer

from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.core.going_on import may_go_on
from penstock.core.report_tokens import ReportTokens
from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.kafka.client.refusals import refuses_all
from penstock.kafka.client.sending import SentBatch, refusals, send_in_batches
from penstock.postgres.release import Batch
from penstock.task_sync.background import Background
from penstock.task_sync.batch_notes import BatchNotes
from penstock.task_sync.ready_topics import ReadyTopic
from penstock.task_sync.spans import start_spans
from penstock.tracing import Span

# Seconds for which the release loop waits until the producer has the batches of a type.
WRITE_S = 0.1
# Seconds for which it waits until Kafka has all batches of types that are to be transferred.
DRAIN_S = 1.0


class ReadyWriter(Background):
    """The batches between their release and their confirmation.

    A type has a task while its last batches are written, and one for each batch until Kafka
    confirms it.

    Args:
        producer: acks=all.
        lag_poll_s: seconds between polls of a topic that just got its first records.
        wake: called when a batch failed, and when a slow one is written.
        fail: ends tasks whose records Kafka refuses, each with the reason.
        notes: of batches; one is confirmed when Kafka has all its records.
        tokens: makes the token of each record.
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        lag_poll_s: float,
        wake: Callable[[], None],
        fail: Callable[[Mapping[Fence, str]], Awaitable[None]],
        notes: BatchNotes,
        tokens: ReportTokens,
    ) -> None:
        super().__init__(wake)
        self._producer = producer
        self._lag_poll_s = lag_poll_s
        self._fail = fail
        self._notes = notes
        self._tokens = tokens
        self._failed: list[tuple[ReadyTopic, KafkaUnavailable | KafkaRefused]] = []
        # Batches that Kafka confirmed.
        self._confirmations = 0

    def progress(self) -> dict[str, Hashable]:
        """The work in progress and its value, for the stall detector; empty at rest."""
        return {"writing released tasks to Kafka": self._confirmations} if self._running else {}

    def has_unconfirmed(self, type_name: str) -> bool:
        """Whether Kafka has not confirmed all batches of this type yet."""
        return bool(self._tasks_of(type_name))

    def take_failed(self) -> list[tuple[ReadyTopic, KafkaUnavailable | KafkaRefused]]:
        """The topics that did not take a batch, whose note stays; each with its error."""
        taken, self._failed = self._failed, []
        return taken

    async def drain(self) -> None:
        """Waits until no batch is being written or confirmed."""
        while self._running:
            await asyncio.wait(self._running.values())

    async def drained(self, names: Sequence[str]) -> list[str]:
        """The types of which Kafka has all batches, after a wait of at most `DRAIN_S`."""
        if waiting := [task for name in names for task in self._tasks_of(name)]:
            await asyncio.wait(waiting, timeout=DRAIN_S)
        return [name for name in names if not self.has_unconfirmed(name)]

    def _tasks_of(self, type_name: str) -> list[asyncio.Task[None]]:
        return [
            task
            for key, task in self._running.items()
            if key == type_name or (isinstance(key, tuple) and key[0] == type_name)
        ]

    async def write(self, topic: ReadyTopic, batches: Sequence[Batch]) -> None:
        """Writes a type's batches in order; returns once they are written, or after `WRITE_S`.

        `take_failed` returns the topic if it does not take all of them; their notes stay.
        """
        task = self.start(topic.type.name, self._write_all(topic, batches))
        if not (await asyncio.wait({task}, timeout=WRITE_S))[0]:
            task.add_done_callback(lambda _task: self._wake())

    async def _write_all(self, topic: ReadyTopic, batches: Sequence[Batch]) -> None:
        with self._reporting(topic):
            for batch in batches:
                await self._write(topic, batch)

    @contextmanager
    def _reporting(self, topic: ReadyTopic) -> Iterator[None]:
        try:
            yield
        except (KafkaUnavailable, KafkaRefused) as error:
            self._failed.append((topic, error))
            self._wake()

    async def _write(self, topic: ReadyTopic, batch: Batch) -> None:
        """Writes a batch's records, each to the partition where it waits least.

        Raises:
            KafkaUnavailable, KafkaRefused: the topic took only some of them.
        """
        # Before the encoding: a record has the trace of its span.
        spans = start_spans(batch.tasks)
        tasks, values = await self._encode(batch.tasks)
        now_s = asyncio.get_running_loop().time()
        if not topic.lag:
            # The topic was empty, so the time in which nothing was taken must not slow the poll of
            # these records.
            topic.taken_changed_s, topic.poll_interval_s = now_s, self._lag_poll_s
        # Already now: the ends that a poll reads during this write are not the last ones.
        topic.written_s = now_s
        chosen = topic.partitions.share(len(tasks), now_s, topic.pace.bundle)
        by_partition: dict[int, list[int]] = {}
        for index, number in enumerate(chosen):
            by_partition.setdefault(number, []).append(index)
        self._require_partitions(topic.topic, by_partition.keys())
        # In the order of the records: a refusal names one by its place among all.
        tasks = [tasks[index] for indexes in by_partition.values() for index in indexes]
        sent: list[SentBatch] = []
        begin = 0
        for number, indexes in by_partition.items():
            records = [(None, values[index]) for index in indexes]
            sent += await send_in_batches(self._producer, topic.topic, number, records, begin)
            end = begin + len(records)
            topic.partitions.add(number, len(records), now_s, [task.priority for task in tasks[begin:end]])
            begin = end
            topic.written_s = asyncio.get_running_loop().time()
        topic.released += len(tasks)
        attempt_ids = [task.fence.attempt_id for task in tasks]
        topic.window.add_released(attempt_ids, now_s)
        topic.pace.add_released(attempt_ids)
        # A batch that is sent again may be confirmed beside its first sending.
        key = topic.type.name, object()
        self.start(key, self._confirm(topic, batch.release_id, tasks, sent, spans))

    def _require_partitions(self, topic: str, numbers: Collection[int]) -> None:
        """Refuses a topic or partition that the producer would wait for."""
        known = self._producer.client.cluster.partitions_for_topic(topic) or set()
        if missing := sorted(set(numbers) - known):
            raise KafkaUnavailable(f"topic {topic} has no partition {missing[0]} now")

    async def _encode(self, tasks: Sequence[ReadyTask]) -> tuple[list[ReadyTask], list[bytes]]:
        """The tasks that have records, and their values; fails the others.

        A row may have a context that cannot be written, which must not stop the type.
        """
        writable: list[ReadyTask] = []
        values: list[bytes] = []
        failed: dict[Fence, str] = {}
        for task in tasks:
            task.token = self._tokens.of(task.attempt_id)
            task.goes_on = task.goes_on and may_go_on(
                proven=task.token is not None, suspect=task.isolation is not None
            )
            try:
                value = task.encode()
            except (TypeError, ValueError) as error:
                failed[task.fence] = f"it cannot be encoded: {error}"
            else:
                writable.append(task)
                values.append(value)
        if failed:
            await self._fail(failed)
        return writable, values

    async def _confirm(
        self,
        topic: ReadyTopic,
        release_id: int,
        tasks: Sequence[ReadyTask],
        sent: Sequence[SentBatch],
        spans: Sequence[Span],
    ) -> None:
        with self._reporting(topic):
            # The type waits for its topic. Records that are sent again would be there twice.
            if refused := await refusals(sent, patient=True):
                if (why := refuses_all(refused, len(tasks))) is not None:
                    raise KafkaUnavailable(
                        f"topic {topic.topic} refuses all records ({why}): check the topic's settings"
                    )
                for index in refused:
                    batch = next(each for each in reversed(sent) if each.begin <= index)
                    topic.partitions.add(batch.partition, -1, topic.written_s)
                # Before the note is deleted: a crash leaves the note, and the batch is sent again.
                await self._fail({tasks[position].fence: why for position, why in refused.items()})
            self._notes.confirm(release_id)
            self._confirmations += 1
            for span in spans:
                span.end()
