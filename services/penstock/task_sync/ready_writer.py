"""Writes released batches to their ready topics, and awaits confirmation in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence

from aiokafka import AIOKafkaProducer

from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.errors import KafkaUnavailable
from penstock.kafka.refusals import refuses_all
from penstock.kafka.sending import SentBatch, refusals, send_in_batches
from penstock.postgres.release import Batch
from penstock.task_sync.ready_topics import ReadyTopic
from penstock.task_sync.spans import start_spans
from penstock.tracing import Span


class ReadyWriter:
    """The batches between their release and the deletion of their notes.

    Args:
        producer: acks=all.
        lag_poll_s: seconds between polls of a topic that just got its first records.
        wake: called when a batch is confirmed after none was, and when one failed.
        fail: ends tasks whose records Kafka refuses, each with the reason.
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        lag_poll_s: float,
        wake: Callable[[], None],
        fail: Callable[[Mapping[Fence, str]], Awaitable[None]],
    ) -> None:
        self._producer = producer
        self._lag_poll_s = lag_poll_s
        self._wake = wake
        self._fail = fail
        self._confirming: set[asyncio.Task[None]] = set()
        self._confirmed: list[int] = []
        self._confirmed_s = 0.0
        self._failure: BaseException | None = None
        self._failed: list[tuple[ReadyTopic, KafkaUnavailable]] = []
        # Batches that Kafka confirmed.
        self._confirmations = 0

    def progress(self) -> dict[str, Hashable]:
        """The work in progress and its mark, for the stall detector; empty at rest."""
        return {"writing released tasks to Kafka": self._confirmations} if self._confirming else {}

    @property
    def confirmed_s(self) -> float | None:
        """When the first of the confirmed batches was confirmed, on the loop's clock, if any."""
        return self._confirmed_s if self._confirmed else None

    def take_confirmed(self) -> list[int]:
        """The batches that Kafka has; the caller deletes their notes."""
        taken, self._confirmed = self._confirmed, []
        return taken

    def take_failed(self) -> list[tuple[ReadyTopic, KafkaUnavailable]]:
        """The topics that did not take a batch, whose note stays; each with its error."""
        taken, self._failed = self._failed, []
        return taken

    def raise_failure(self) -> None:
        """Raises the first error that is not one of a topic."""
        if self._failure is not None:
            raise self._failure

    async def drain(self) -> None:
        """Waits until no batch is being confirmed."""
        if self._confirming:
            await asyncio.gather(*self._confirming)

    async def write(self, topic: ReadyTopic, batch: Batch) -> None:
        """Writes a batch's records, each to the partition where it waits least.

        Raises:
            KafkaUnavailable: the topic took only some of them; the batch note stays.
        """
        # Before the encoding: a record has the trace of its span.
        spans = start_spans(batch.tasks)
        tasks, values = await self._encode(batch.tasks)
        now_s = asyncio.get_running_loop().time()
        if not topic.lag:
            # The topic was empty, so the time in which nothing was taken must not slow the poll of
            # these records.
            topic.taken_changed_s, topic.poll_interval_s = now_s, self._lag_poll_s
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
            topic.partitions.add(number, len(records), now_s)
            begin += len(records)
        topic.written_s = now_s
        topic.released += len(tasks)
        attempt_ids = [task.fence.attempt_id for task in tasks]
        topic.window.add_released(attempt_ids, now_s)
        topic.pace.add_released(attempt_ids)
        confirming = asyncio.create_task(self._confirm(topic, batch.release_id, tasks, sent, spans))
        self._confirming.add(confirming)
        confirming.add_done_callback(self._confirming.discard)

    def _require_partitions(self, topic: str, numbers: Collection[int]) -> None:
        """Refuses a topic or partition that the producer would wait for, and all types with it."""
        known = self._producer.client.cluster.partitions_for_topic(topic) or set()
        if missing := sorted(set(numbers) - known):
            raise KafkaUnavailable(f"topic {topic} has no partition {missing[0]} now")

    async def _encode(self, tasks: Sequence[ReadyTask]) -> tuple[list[ReadyTask], list[bytes]]:
        """The tasks that have records, and their values; fails the others.

        An earlier version may have stored a context that cannot be written.
        """
        writable: list[ReadyTask] = []
        values: list[bytes] = []
        failed: dict[Fence, str] = {}
        for task in tasks:
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
        try:
            if refused := await refusals(sent):
                if (why := refuses_all(refused, len(tasks))) is not None:
                    raise KafkaUnavailable(  # noqa: TRY301 (handled as any other failure of the topic)
                        f"topic {topic.topic} refuses all records ({why}): check the topic's settings"
                    )
                for index in refused:
                    batch = next(each for each in reversed(sent) if each.begin <= index)
                    topic.partitions.add(batch.partition, -1, topic.written_s)
                # Before the note is deleted: a crash leaves the note, and the batch is sent again.
                await self._fail({tasks[position].fence: why for position, why in refused.items()})
        except KafkaUnavailable as error:
            self._failed.append((topic, error))
            self._wake()
        except Exception as error:  # noqa: BLE001 (`raise_failure` raises it in the release loop)
            self._failure = error
            self._wake()
        else:
            if not self._confirmed:
                self._confirmed_s = asyncio.get_running_loop().time()
                self._wake()
            self._confirmed.append(release_id)
            self._confirmations += 1
            for span in spans:
                span.end()
