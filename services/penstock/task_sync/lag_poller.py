"""Polls the lag of ready topics, each type in a task of its own, beside the release loop.

A type whose lag is not known releases until its window is full by the last known one, and then
waits. So it fails closed: at most a window of records is on its topic, and no other type waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from math import inf

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from penstock.core import position
from penstock.core.task import Priority
from penstock.core.window import WindowReason
from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.kafka.client.connection import translated
from penstock.kafka.client.health import probe
from penstock.kafka.topology import group_members
from penstock.kafka.topology.topics import workers_group
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.task_sync.background import Background
from penstock.task_sync.ready_topics import ReadyTopic
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
# Seconds for one poll, and between polls while they fail: while Kafka does not answer, and while it
# refuses them, which an operator has to change.
POLL_S = 5.0
FAILED_POLL_S = 0.5
REFUSED_POLL_S = 10.0
# Seconds without a successful poll of any type after which the admin client itself must answer.
LOST_S = 20.0
# Polls that end together wake the release loop once.
WAKE_S = 0.005


class LagPoller(Background):
    """Polls the lag of ready topics for their windows.

    Args:
        settings: of the service.
        session: the owner of the types.
        admin: reads the workers' committed offsets.
        offsets: reads the bounds of ready topics.
        producer: tells, as another client, whether Kafka is away.
        wake: called when polls have ended.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        session: Session,
        admin: AIOKafkaAdminClient,
        offsets: AIOKafkaConsumer | None = None,
        producer: AIOKafkaProducer | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(wake)
        self._offsets = offsets
        self._settings = settings
        self._session = session
        self._admin = admin
        self._producer = producer
        # By group, the broker that was its coordinator at the last poll.
        self._coordinators: dict[str, int] = {}
        self._polled: list[ReadyTopic] = []
        self._waking: asyncio.TimerHandle | None = None
        # The last failure that was reported, until a poll succeeds.
        self._reported = ""
        self._ended = 0
        # Since when every poll has failed, on the loop's clock.
        self._failing_since_s: float | None = None

    def progress(self) -> dict[str, Hashable]:
        """The polls under way and their value, for the stall detector."""
        return {"polling the lag of ready topics": self._ended} if self._running else {}

    def begin(self, topic: ReadyTopic) -> None:
        """Begins a poll of a type, which also adapts a window that is over half full."""
        self.start(topic.type.name, self._run(topic)).add_done_callback(self._wake_soon)

    def begin_due(self, topics: Iterable[ReadyTopic]) -> None:
        """Begins the polls that are due."""
        now_s = asyncio.get_running_loop().time()
        for topic in topics:
            if topic.type.name not in self and topic.poll_at_s() <= now_s:
                self.begin(topic)

    def next_s(self, topics: Iterable[ReadyTopic]) -> float:
        """When the next poll is due that is not under way, on the loop's clock."""
        return min((each.poll_at_s() for each in topics if each.type.name not in self), default=inf)

    def take_polled(self) -> list[ReadyTopic]:
        """The topics whose polls have succeeded since the last call, or found a broken topic.

        Raises:
            SessionLost, PostgresUnavailable: the session failed.
            KafkaUnavailable: the admin client has lost Kafka.
        """
        self.raise_failure()
        polled, self._polled = self._polled, []
        return polled

    async def stop(self) -> None:
        """Cancels all polls and waits for their end."""
        if self._waking is not None:
            self._waking.cancel()
        await super().stop()

    def _wake_soon(self, _task: asyncio.Task[None]) -> None:
        self._ended += 1
        if self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(WAKE_S, self._wake_up)

    def _wake_up(self) -> None:
        self._waking = None
        self._wake()

    async def _run(self, topic: ReadyTopic) -> None:
        measured = topic.may_have_ready and topic.half_full
        try:
            await self.poll(topic)
            self._failing_since_s, self._reported = None, ""
            topic.lag_failure = None
            topic.first_ready = await self._first_ready(topic)
            if measured:
                await self._measure(topic)
            self._polled.append(topic)
        except KafkaRefused as error:
            self._fail(topic, error, REFUSED_POLL_S)
        except KafkaUnavailable as error:
            self._fail(topic, error, FAILED_POLL_S)
            await self._verify_client()

    def _fail(self, topic: ReadyTopic, error: KafkaRefused | KafkaUnavailable, retry_s: float) -> None:
        topic.polled_s = asyncio.get_running_loop().time()
        topic.poll_interval_s = retry_s
        # Once for all types: an outage of Kafka concerns each of them, a refusal only its own.
        for_all = isinstance(error, KafkaUnavailable)
        if str(topic.lag_failure) != str(error) and not (for_all and str(error) == self._reported):
            if for_all:
                self._reported = str(error)
            log.warning(
                "The lag of a type is unknown; the last known lag bounds its release",
                extra={"event": "lag_poll_failed", "task_type": topic.type.name, "error": error},
            )
        topic.lag_failure = error

    async def _verify_client(self) -> None:
        """Ends the service, which begins again, if only the client that polls has lost Kafka.

        In an outage of Kafka it goes on: all types are released as soon as a broker answers.
        """
        now_s = asyncio.get_running_loop().time()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        elif self._producer is not None and now_s - self._failing_since_s >= LOST_S:
            try:
                await probe(self._producer, self._settings.kafka)
            except KafkaUnavailable:
                return
            try:
                async with asyncio.timeout(POLL_S):
                    with translated():
                        await self._admin.list_topics()
            except (TimeoutError, KafkaUnavailable) as error:
                raise KafkaUnavailable(f"no broker answers the polls of the lag: {error!r}") from error

    async def poll(self, topic: ReadyTopic) -> None:
        """Reads how many records of the topic the workers have taken.

        Raises:
            KafkaUnavailable: no broker tells it now.
            KafkaRefused: this user may not read it.
        """
        try:
            async with asyncio.timeout(POLL_S), topic.polling:
                await self._poll(topic)
        except TimeoutError as error:
            raise KafkaUnavailable(f"no broker tells the workers' offsets within {POLL_S:g} s") from error

    async def _poll(self, topic: ReadyTopic) -> None:
        group = workers_group(self._settings.prefix, topic.type.name)
        committed = await self._committed(group)
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

    async def _first_ready(self, topic: ReadyTopic) -> Priority | None:
        """The priority of the first task that a full window of late records keeps from release.

        Limits and keys may keep the first task of other types from release, so theirs overtake
        nothing.
        """
        if not topic.may_have_ready or topic.partitions.late_at_s() > topic.polled_s or topic.room() > 0:
            return None
        task_type = topic.type
        if task_type.paused or task_type.max_in_flight is not None or task_type.starts_per_s is not None:
            return None
        return await release.first_ready(self._session, task_type.name)

    async def _find_readers(self, topic: ReadyTopic, group: str) -> None:
        """Reads which worker reads which partition; a few requests, as records wait for long."""
        try:
            readers = await group_members.readers(self._admin, group, topic.topic)
        except KafkaUnavailable as error:
            # Withdrawals wait.
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
            failure = KafkaUnavailable(f"topic {topic.topic} does not tell its bounds: {error!r}")
            if await self._is_whole(topic):
                # Kafka is slow, or away: nothing is wrong with this topic.
                raise failure from error
            topic.failure = failure
            return
        topic.begins = {tp.partition: begin for tp, begin in begins.items()}
        topic.invalid = {
            tp.partition: committed[tp.partition]
            for tp, end in ends.items()
            if committed.get(tp.partition, -1) > end
        }
        if now_s - topic.written_s >= BOUNDS_S:
            topic.partitions.correct({tp.partition: end for tp, end in ends.items()})

    async def _is_whole(self, topic: ReadyTopic) -> bool:
        """Whether all partitions of a topic exist and have leaders: it may have been deleted."""
        with translated():
            [found] = await self._admin.describe_topics([topic.topic])
        leaders = [each["leader"] for each in found["partitions"]]
        return len(leaders) >= topic.type.partitions and min(leaders) >= 0

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

    async def _measure(self, topic: ReadyTopic) -> None:
        if topic.size_and_reason()[1] is not WindowReason.RATE:
            # A rate keeps the lag low even for workers that are not starved.
            topic.window.observe_lag(topic.lag, topic.polled_s)
        if topic.polled_s - topic.measured_s < MEASURE_S or topic.polled_s - topic.taken_changed_s > IDLE_S:
            return
        in_flight = await release.in_flight(self._session, topic.window.sample())
        topic.measured_s = asyncio.get_running_loop().time()
        topic.window.observe_sample(in_flight, topic.measured_s)
