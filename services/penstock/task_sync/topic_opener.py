"""Creates and reads the ready topics of newly owned types, beside the release loop.

A broker takes about a tenth of a second for each topic that it creates. The types that are owned
already are released meanwhile, and a type of one namespace does not wait for all topics of another:
topics are created a few at a time. A topic that Kafka does not create, or that cannot be read, is
tried again and holds only its own type. So does one that an access list forbids, until an operator
permits it. One with fewer partitions than its type gets the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Container, Coroutine, Hashable, Sequence
from enum import StrEnum

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.task_type import TaskType
from penstock.core.retry import Backoff
from penstock.core.window import Window, WindowPolicy
from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.kafka.client.connection import translated
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import Topic, ready
from penstock.task_sync.background import Background
from penstock.task_sync.ready_topics import ReadyTopic
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Topics that are created at a time.
REQUESTS = 8
# Seconds in which topics must be read. The client waits much longer for a partition that is
# missing, or without a leader.
READ_S = 3.0
# A topic may answer and take no records. One that fails again within `STEADY_S` is opened later and
# later.
REOPENED_BACKOFF = Backoff(base_s=0.5, factor=2, max_s=15.0, jitter=0.3)
STEADY_S = 60.0
# Seconds between tries of a topic that Kafka forbids: an operator has to permit it.
REFUSED_S = 10.0


class HeldReason(StrEnum):
    """Why a type is not released; the label of `penstock_type_held`."""

    TOPIC_REFUSED = "topic_refused"
    TOPIC_UNAVAILABLE = "topic_unavailable"
    LAG_UNKNOWN = "lag_unknown"


class TopicOpener(Background):
    """The ready topics of types that this process has acquired and does not release yet.

    Args:
        settings: of the service.
        admin: lists the topics.
        end_offsets: reads the topics' end offsets.
        producer: will write to the topics, and must know them first.
        wake: called when topics are open, and when one failed.

    Attributes:
        held: types whose topic failed and has taken no record since.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        admin: AIOKafkaAdminClient,
        end_offsets: AIOKafkaConsumer,
        producer: AIOKafkaProducer,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(wake)
        self._settings = settings
        self._admin = admin
        self._end_offsets = end_offsets
        self._producer = producer
        self._requests = asyncio.Semaphore(REQUESTS)
        self._opened: list[ReadyTopic] = []
        # By type: when its topic failed, and how often since it was steady.
        self._failures: dict[str, tuple[float, int]] = {}
        # By type, why its topic is not open.
        self.held: dict[str, HeldReason] = {}
        # Requests that create topics, and tries to open one.
        self._attempts = 0

    def progress(self) -> dict[str, Hashable]:
        """The work in progress and its value, for the stall detector; empty at rest."""
        return {"creating ready topics": self._attempts} if self._running else {}

    def open(self, task_types: Sequence[TaskType]) -> None:
        """Begins to open the topics of types whose locks this process has."""
        if task_types:
            self._start(self._open_all(task_types))

    def reopen(self, task_type: TaskType, error: KafkaUnavailable | KafkaRefused) -> None:
        """Begins to open the topic of a type again, after it has failed."""
        self._hold(task_type, error)
        now_s = asyncio.get_running_loop().time()
        last_s, failures = self._failures.get(task_type.name, (now_s, 0))
        failures = failures + 1 if now_s - last_s < STEADY_S else 0
        self._failures[task_type.name] = now_s, failures
        delay_s = REOPENED_BACKOFF.delay_s(failures, random.random()) if failures else 0.0  # noqa: S311 (jitter)
        self._start(self._open_alone(task_type, delay_s))

    def end_holds(self, opened: Container[str], has_unconfirmed: Callable[[str], bool]) -> None:
        """Ends the holds of opened types that have no unconfirmed batch.

        A topic that can be read may still refuse records.
        """
        for name in tuple(self.held):
            if name in opened and not has_unconfirmed(name):
                del self.held[name]

    def take_opened(self) -> list[ReadyTopic]:
        """The topics that were opened since the last call.

        Raises:
            SettingsError: topics cannot be created as declared.
        """
        self.raise_failure()
        opened, self._opened = self._opened, []
        return opened

    async def _open_all(self, task_types: Sequence[TaskType]) -> None:
        try:
            with translated():
                existing = set(await self._admin.list_topics())
        except KafkaUnavailable:
            self._open_each(task_types)
            return
        found = [each for each in task_types if self._settings.prefix + _topic(each).name in existing]
        self._open_each([each for each in task_types if each not in found])
        try:
            # Together: a lost replica may leave hundreds.
            await self._read(found)
        except (KafkaUnavailable, KafkaRefused):
            self._open_each(found)

    def _open_each(self, task_types: Sequence[TaskType]) -> None:
        """Opens topics one by one: one of them may be broken, which must not hold the others."""
        for each in task_types:
            self._start(self._open_alone(each))

    async def _open_alone(self, task_type: TaskType, delay_s: float = 0.0) -> None:
        await asyncio.sleep(delay_s)

        async def attempt() -> None:
            self._attempts += 1
            try:
                if not await self._widen(task_type):
                    await self._request(task_type)
                await self._read([task_type])
            except KafkaUnavailable as error:
                self._hold(task_type, error)
                raise

        while True:
            try:
                await retry_until_available(
                    attempt, waiting_for=f"the ready topic of {task_type.name}", retry_on=(KafkaUnavailable,)
                )
            except KafkaRefused as error:
                self._hold(task_type, error)
                await asyncio.sleep(REFUSED_S)
            else:
                return

    def _hold(self, task_type: TaskType, error: KafkaUnavailable | KafkaRefused) -> None:
        reason = HeldReason.TOPIC_REFUSED if isinstance(error, KafkaRefused) else HeldReason.TOPIC_UNAVAILABLE
        if self.held.get(task_type.name) is not reason:
            log.warning(
                "A ready topic fails; its type waits until the topic answers",
                extra={"event": "ready_topic_failed", "task_type": task_type.name, "error": error},
            )
        self.held[task_type.name] = reason

    async def _widen(self, task_type: TaskType) -> bool:
        """Adds the partitions that the topic of a type lacks: it was created elsewhere.

        Returns whether the topic exists.
        """
        name, wanted = self._settings.prefix + _topic(task_type).name, task_type.partitions
        with translated():
            [found] = await self._admin.describe_topics([name])
        count = len(found["partitions"])
        if not 0 < count < wanted:
            return count > 0
        async with self._requests:
            try:
                with translated():
                    await self._admin.create_partitions({name: NewPartitions(wanted)})
            except KafkaRefused as error:
                raise KafkaUnavailable(
                    f"topic {name} has {count} of {wanted} partitions, and task-sync may add none: "
                    "add them with Kafka's own tools"
                ) from error
            log.warning(
                "A ready topic had fewer partitions than its type; the others are added",
                extra={"event": "ready_topic_widened", "task_type": task_type.name, "partitions": count},
            )
        return True

    async def _request(self, task_type: TaskType) -> None:
        async with self._requests:
            self._attempts += 1
            await create_topics(self._settings, [_topic(task_type)])

    async def _read(self, task_types: Sequence[TaskType]) -> None:
        if task_types:
            try:
                async with asyncio.timeout(READ_S):
                    opened = await _ready_topics(self._settings, task_types, self._end_offsets)
                    with translated():
                        await asyncio.gather(*(self._producer.partitions_for(each.topic) for each in opened))
            except TimeoutError as error:
                names = ", ".join(each.name for each in task_types[:3])
                raise KafkaUnavailable(f"the ready topics of {names} do not answer") from error
            # After the wait: the loop may have taken the list meanwhile.
            self._opened += opened
            self._wake()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self.start(work, work)


def _topic(task_type: TaskType) -> Topic:
    return ready(task_type.name, task_type.partitions)


async def _ready_topics(
    settings: TaskSyncSettings, task_types: Sequence[TaskType], end_offsets: AIOKafkaConsumer
) -> list[ReadyTopic]:
    """Reads the ready topics of types together; the topics exist."""
    policy = WindowPolicy(settings.window_floor, settings.window, settings.window_s)
    topics = [ReadyTopic(each, settings.prefix + _topic(each).name, Window(policy)) for each in task_types]
    partitions = [
        TopicPartition(topic.topic, number) for topic in topics for number in range(topic.type.partitions)
    ]
    with translated():
        ends = await end_offsets.end_offsets(partitions)
    now_s = asyncio.get_running_loop().time()
    for topic in topics:
        topic.partitions.start(
            {tp.partition: end for tp, end in ends.items() if tp.topic == topic.topic}, now_s
        )
    return topics
