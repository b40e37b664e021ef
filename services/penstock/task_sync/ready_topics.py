"""The state of owned types: their ready topic, its lag, and the window that bounds it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    KafkaError,
    NotCoordinatorForGroupError,
)
from aiokafka.structs import OffsetAndMetadata

from penstock.core import position
from penstock.core.attempt_pace import AttemptPace
from penstock.core.ready_partitions import ReadyPartitions
from penstock.core.window import Window, WindowPolicy, WindowReason
from penstock.errors import KafkaUnavailable
from penstock.kafka import membership
from penstock.kafka.connection import translated
from penstock.kafka.topics import ready, workers_group
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.postgres.types import TaskType
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Seconds between measurements of the sample, while a window is at least half full.
MEASURE_S = 0.2
# Seconds without a taken record after which the bounds of a topic are read, and between two reads.
BOUNDS_S = 1.0
# Seconds for one read: the client would wait long for a topic that was deleted.
BOUNDS_WITHIN_S = 2.0
# Skip types that have been idle this long; there may be hundreds of them.
IDLE_S = 10.0
# Poll an idle topic less often: every tenth of its idle time, up to a limit.
IDLE_POLL_SHARE = 10
MAX_POLL_S = 1.0
# The same where no worker reads: there may be hundreds of such types.
UNREAD_POLL_S = 15.0
# The answers while a group has no coordinator, or the group moves to another broker.
_NO_COORDINATOR = (
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    NotCoordinatorForGroupError,
)


@dataclass(slots=True)
class ReadyTopic:
    """The ready topic of one owned type. All moments are on the loop's clock.

    Attributes:
        type: its settings.
        topic: full name of the topic.
        window: how many records may wait there; a rate can set a smaller bound (`size_and_reason`).
        partitions: what each partition holds, and which worker reads it.
        begins: offset of each partition's oldest record, at the last look.
        invalid: committed offsets that were beyond the end at the last look, by partition.
        bounds_s: when the bounds were last read.
        written_s: when a batch was last written.
        may_have_ready: a task of the type may be ready.
        may_have_queued: a task of the type may be queued.
        polled_s: when the workers' offsets were last read.
        taken_changed_s: when they were last found changed.
        poll_interval_s: seconds until they are read again.
        measured_s: when the window's sample was last read.
        released: tasks that this process released.
        withdrawn: tasks that it withdrew from busy workers.
        pace: how long the type's attempts take.
        logged_reason: the reason of the window's size that was last logged.
        full: the window was full, and more than half of its records wait still.
        polling: one poll at a time, so that no older answer follows a newer one.
        failure: why its bounds could not be read; it is to be opened anew.
    """

    type: TaskType
    topic: str
    window: Window
    may_have_ready: bool = True
    may_have_queued: bool = True
    polled_s: float = float("-inf")
    taken_changed_s: float = float("-inf")
    poll_interval_s: float = 0.0
    measured_s: float = float("-inf")
    released: int = 0
    withdrawn: int = 0
    logged_reason: WindowReason = WindowReason.FLOOR
    full: bool = False
    begins: dict[int, int] = field(default_factory=dict)
    invalid: dict[int, int] = field(default_factory=dict)
    bounds_s: float = float("-inf")
    written_s: float = float("-inf")
    pace: AttemptPace = field(default_factory=AttemptPace)
    polling: asyncio.Lock = field(default_factory=asyncio.Lock)
    failure: KafkaUnavailable | None = None
    partitions: ReadyPartitions = field(init=False)

    def __post_init__(self) -> None:
        self.partitions = ReadyPartitions(self.type.partitions)

    @property
    def lag(self) -> int:
        """Records of tasks that no worker has taken."""
        return self.partitions.lag

    def room(self) -> int:
        """How many more records may wait on the topic.

        A full window has no room until half of it is taken: tasks that are released one by one are
        claimed, run and committed one by one, too.
        """
        size, lag = self.size_and_reason()[0], self.lag
        self.full = lag >= size or (self.full and lag * 2 > size)
        return 0 if self.full else size - lag

    def needs_poll(self, now_s: float) -> bool:
        """Whether a window that is over half full is due for a poll and may get a task."""
        return (
            self.may_have_ready
            and self.lag * 2 > self.size_and_reason()[0]
            and now_s - self.polled_s >= self.poll_interval_s
        )

    def check_at_s(self) -> float:
        """When to poll for records that a busy worker may not take; infinity without records."""
        return max(self.partitions.late_at_s(), self.polled_s + self.poll_interval_s)

    def size_and_reason(self) -> tuple[int, WindowReason]:
        """Most records that may wait, and the bound that sets it.

        A type with a rate has at most one second of starts there, because a worker that joins late
        begins them at once.
        """
        rate = self.type.starts_per_s
        if rate is not None and max(1, ceil(rate)) < self.window.size:
            return max(1, ceil(rate)), WindowReason.RATE
        return self.window.size, self.window.reason


class LagPoller:
    """Polls the lag of ready topics for their windows.

    Args:
        settings: of the service.
        session: the owner of the types.
        admin: reads the workers' committed offsets.
        offsets: reads the bounds of ready topics.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        session: Session,
        admin: AIOKafkaAdminClient,
        offsets: AIOKafkaConsumer | None = None,
    ) -> None:
        self._offsets = offsets
        self._settings = settings
        self._session = session
        self._admin = admin
        # By group, the broker that was its coordinator at the last poll.
        self._coordinators: dict[str, int] = {}

    async def poll(self, topic: ReadyTopic) -> None:
        """Reads how many records of the topic the workers have taken."""
        async with topic.polling:
            await self._poll(topic)

    async def _poll(self, topic: ReadyTopic) -> None:
        group = workers_group(self._settings.prefix, topic.type.name)
        try:
            committed = await self._committed(group)
        except KafkaUnavailable as error:
            if not isinstance(error.__cause__, _NO_COORDINATOR):
                raise
            # A broker that has just started appoints coordinators later; the value of the poll
            # before holds until then.
            log.info(
                "Offsets of a workers' group are not available yet",
                extra={"event": "group_offsets_delayed", "task_type": topic.type.name, "error": error},
            )
            taken = {}
        else:
            offsets = {tp.partition: meta.offset for tp, meta in committed.items() if tp.topic == topic.topic}
            await self._read_bounds(topic, offsets)
            taken = {
                # An offset that was found beyond the end counts for nothing until it changes.
                number: position.taken(
                    -1 if topic.invalid.get(number) == offsets.get(number) else offsets.get(number, -1),
                    topic.begins.get(number, 0),
                )
                for number in topic.begins.keys() | offsets.keys()
            }
        topic.polled_s = asyncio.get_running_loop().time()
        if taken and topic.partitions.take(taken, topic.polled_s):
            topic.taken_changed_s = topic.polled_s
        if topic.partitions.needs_readers(topic.polled_s):
            await self._find_readers(topic, group)
        interval_s = (topic.polled_s - topic.taken_changed_s) / IDLE_POLL_SHARE
        most_s = MAX_POLL_S if topic.may_have_ready or topic.partitions.has_readers else UNREAD_POLL_S
        topic.poll_interval_s = max(self._settings.lag_poll_s, min(interval_s, most_s))

    async def _find_readers(self, topic: ReadyTopic, group: str) -> None:
        """Reads which worker reads which partition; a few requests, as records wait for long."""
        try:
            readers = await membership.readers(self._admin, group, topic.topic)
        except KafkaUnavailable as error:
            # Withdrawals wait; a poll decides whether Kafka is lost.
            log.info(
                "The workers of a type are unknown for now",
                extra={"event": "readers_unknown", "task_type": topic.type.name, "error": error},
            )
            readers = {}
        topic.partitions.set_readers(readers, topic.polled_s)

    async def _read_bounds(self, topic: ReadyTopic, committed: Mapping[int, int]) -> None:
        """Reads the bounds of a topic that is new or of which nothing was taken for a while.

        Its records may be deleted, or it may have lost its tail: then its readers take nothing, and
        the window would stay full.
        """
        now_s = asyncio.get_running_loop().time()
        if self._offsets is None or now_s - max(topic.taken_changed_s, topic.bounds_s) < BOUNDS_S:
            return
        topic.bounds_s = now_s
        partitions = [TopicPartition(topic.topic, number) for number in range(topic.type.partitions)]
        try:
            async with asyncio.timeout(BOUNDS_WITHIN_S):
                with translated():
                    begins = await self._offsets.beginning_offsets(partitions)
                    ends = await self._offsets.end_offsets(partitions)
        except (TimeoutError, KafkaUnavailable) as error:
            # The topic may be deleted, or have fewer partitions than its type.
            topic.failure = KafkaUnavailable(f"topic {topic.topic} does not tell its bounds: {error!r}")
            return
        topic.begins = {tp.partition: begin for tp, begin in begins.items()}
        topic.invalid = {
            tp.partition: committed[tp.partition]
            for tp, end in ends.items()
            if committed.get(tp.partition, -1) > end
        }
        if now_s - topic.written_s >= BOUNDS_S:
            topic.partitions.correct({tp.partition: end for tp, end in ends.items()})

    async def _committed(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """A group's offsets, from its last known coordinator or from its current one."""
        offsets: dict[TopicPartition, OffsetAndMetadata] = {}
        with translated():
            coordinator = self._coordinators.pop(group, None)
            if coordinator is not None:
                with suppress(KafkaError):
                    offsets = await self._admin.list_consumer_group_offsets(group, coordinator)
            if not offsets:
                # The client also returns nothing when the broker answers that it is not the
                # coordinator.
                coordinator = await self._admin.find_coordinator(group)
                offsets = await self._admin.list_consumer_group_offsets(group, coordinator)
        if offsets and coordinator is not None:
            self._coordinators[group] = coordinator
        return offsets

    async def open(self, task_types: Sequence[TaskType], end_offsets: AIOKafkaConsumer) -> list[ReadyTopic]:
        """Reads the ready topics of new types together: a lost replica may leave hundreds.

        Args:
            task_types: the types; their topics exist.
            end_offsets: reads the topics' end offsets.
        """
        settings = self._settings
        policy = WindowPolicy(settings.window_floor, settings.window, settings.window_s)
        topics = [
            ReadyTopic(
                task_type, settings.prefix + ready(task_type.name, task_type.partitions).name, Window(policy)
            )
            for task_type in task_types
        ]
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
        await asyncio.gather(*map(self.poll, topics))
        return topics

    async def poll_and_measure(self, topics: Sequence[ReadyTopic]) -> None:
        """Polls windows that are at least half full, and adapts their sizes."""
        # Together: one by one, hundreds of types without workers would delay the types with
        # workers.
        await asyncio.gather(*map(self.poll, topics))
        for topic in topics:
            await self._measure(topic)
            _log_new_reason(topic)

    async def _measure(self, topic: ReadyTopic) -> None:
        if topic.size_and_reason()[1] is not WindowReason.RATE:
            # A rate keeps the lag low even for workers that are not starved.
            topic.window.observe_lag(topic.lag, topic.polled_s)
        if topic.polled_s - topic.measured_s < MEASURE_S or topic.polled_s - topic.taken_changed_s > IDLE_S:
            return
        in_flight = await release.in_flight(self._session, topic.window.sample())
        topic.measured_s = asyncio.get_running_loop().time()
        topic.window.observe_sample(in_flight, topic.measured_s)


def _log_new_reason(topic: ReadyTopic) -> None:
    size, reason = topic.size_and_reason()
    if reason is not topic.logged_reason:
        topic.logged_reason = reason
        log.debug(
            "The bound of a window changed",
            extra={
                "event": "window_changed",
                "task_type": topic.type.name,
                "reason": reason.value,
                "size": size,
                "completions_per_s": round(topic.window.completions_per_s, 1),
                "lag": topic.lag,
            },
        )
