"""The release loop: releases tasks of the owned types, as windows and limits allow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import suppress

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from penstock.core.completion import Fence
from penstock.core.report_tokens import ReportTokens
from penstock.core.turn_pace import TurnPace
from penstock.postgres import release
from penstock.postgres.ownership import Ownership
from penstock.postgres.release import TYPES
from penstock.postgres.session import Session
from penstock.postgres.types import TypeCache
from penstock.task_sync.batch_notes import BatchNotes
from penstock.task_sync.lag_poller import LagPoller
from penstock.task_sync.limits import ReleaseLimiter
from penstock.task_sync.owned_topics import OwnedTopics
from penstock.task_sync.promotion import Promotion
from penstock.task_sync.queued_cutoffs import QueuedCutoffs
from penstock.task_sync.ready_writer import ReadyWriter
from penstock.task_sync.settings import TaskSyncSettings
from penstock.task_sync.topic_opener import TopicOpener
from penstock.task_sync.withdrawal import Withdrawal

# Released tasks a second up to which no release waits, and from which it waits for the longest gap:
# two tasks rarely share a shorter one.
UNPACED_PER_S, PACED_PER_S = 100.0, 300.0
LONGEST_GAP_S = 0.032


class ReleaseLoop:
    """The loop that releases tasks of owned types. Its parts serve Kafka beside it.

    Args:
        settings: of the service.
        session: holds the locks of the owned types; every release goes through it.
        producer: acks=all.
        types: the registered types.
        admin: reads the workers' committed offsets.
        end_offsets: reads the end offsets of ready topics.
        fail: ends tasks whose records Kafka refuses, each with the reason.

    Attributes:
        topics: of the types that are owned now.
        cutoffs: of their queued tasks.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        session: Session,
        producer: AIOKafkaProducer,
        types: TypeCache,
        admin: AIOKafkaAdminClient,
        end_offsets: AIOKafkaConsumer,
        fail: Callable[[Mapping[Fence, str]], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._session = session
        self._wake = asyncio.Event()
        wake = self._wake.set
        self._ownership = Ownership(session, TYPES, settings.own_retry_s, wake)
        self._notes = BatchNotes(session, wake)
        self._lag_poller = LagPoller(settings, session, admin, end_offsets, producer, wake)
        self._limiter = ReleaseLimiter(session, self.on_ready)
        self._opener = TopicOpener(settings, admin, end_offsets, producer, wake)
        # When one ends, its type may be transferred, and the withdrawn tasks are to be released.
        self._withdrawal = Withdrawal(
            settings, session, producer, admin, self._lag_poller, self._ownership.retry_surplus
        )
        tokens = ReportTokens(settings.report_keys)
        self._writer = ReadyWriter(producer, settings.lag_poll_s, wake, fail, self._notes, tokens)
        self.topics = OwnedTopics(
            self._ownership,
            types,
            self._opener,
            self._limiter,
            self._writer,
            self._notes,
            self._withdrawal,
            wake,
        )
        self.cutoffs = QueuedCutoffs(session, self.topics, wake)
        self._pace = TurnPace(UNPACED_PER_S, PACED_PER_S, LONGEST_GAP_S)
        self._promotion = Promotion(session, settings.release_batch)
        # Progress for the stall detector: the loop's step, empty while it sleeps, and a counter.
        self._step = ""
        self._step_count = 0

    def on_ready(self, type_name: str) -> None:
        """A task of the type may have become ready."""
        topic = self.topics.get(type_name)
        if topic is not None:
            topic.may_have_ready = True
            self._limiter.on_ready(type_name)
        self._wake.set()

    def on_due_changed(self, _type_name: str) -> None:
        """A task was scheduled, perhaps for an earlier moment than all others."""
        self._promotion.changed = True
        self._wake.set()

    def progress(self) -> dict[str, Hashable]:
        """Work in progress, each with a value that changes as it advances; empty at rest.

        A full window is rest, because it waits for workers.
        """
        # A statement that waits for another transaction is repeated.
        step_value = (self._step_count, self._session.lock_conflicts, self._ownership.statements)
        progress: dict[str, Hashable] = {self._step: step_value} if self._step else {}
        parts = (self._opener, self._writer, self._withdrawal, self._lag_poller)
        return progress | {name: value for part in parts for name, value in part.progress().items()}

    def _begin_step(self, step: str) -> None:
        self._step = step
        self._step_count += 1

    async def run(self, stopping: asyncio.Event) -> None:
        """Releases until `stopping` is set; then waits until Kafka has every released task.

        Raises:
            SessionLost: the locks are lost; another replica may release these types by now.
            PostgresUnavailable, KafkaUnavailable: the next owner sends again what Kafka has not
                confirmed.
        """
        async with self._ownership.membership(stopping):
            try:
                await self._release_until(stopping)
                await self._writer.drain()
            finally:
                self._limiter.close()
                await self._lag_poller.stop()
                await self._withdrawal.stop()
                await self._opener.stop()
                await self._writer.stop()
            await self._notes.delete()

    async def _release_until(self, stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        due_at_s = loop.time()
        sweep_at_s = loop.time() + self._settings.sweep_s
        while not stopping.is_set():
            self._wake.clear()
            self._session.ensure()
            self._writer.raise_failure()
            self._withdrawal.raise_failure()
            self.topics.follow_writes()
            now_s = loop.time()
            if now_s >= sweep_at_s:
                self._begin_step("sweeping for lost notifications")
                await self._sweep()
                sweep_at_s = now_s + self._settings.sweep_s
            for topic in self._opener.take_opened():
                self._begin_step(f"opening {topic.type.name}")
                self.cutoffs.on_queued(topic)
                await self.topics.open(topic)
            if self.topics.assign_due:
                self._begin_step("assigning types")
                await self.topics.assign()
            if self._promotion.changed or now_s >= due_at_s:
                self._begin_step("promoting due tasks")
                promoted, due_at_s = await self._promotion.step()
                # Without waiting for the notification.
                self._mark_ready(promoted)
            await asyncio.sleep(self._pace.wait_s(loop.time()))
            self._poll()
            await self._release_batches()
            self._begin_step("reading cutoffs of queued tasks")
            await self.cutoffs.answer()
            if loop.time() >= self._notes.delete_at_s:
                await self._notes.delete()
            topics = self.topics.ready_topics()
            if not any(
                topic.may_have_ready and topic.room() > 0 and topic.type.name not in self._writer
                for topic in topics
            ):
                times_s = (self._ownership.next_s, self._notes.delete_at_s, self._lag_poller.next_s(topics))
                await self._sleep(min(due_at_s, sweep_at_s, *times_s))

    async def _sweep(self) -> None:
        """Finds the changes whose notifications were lost."""
        self.topics.mark_types_outdated()
        self._promotion.changed = True
        names = [topic.type.name for topic in self.topics.ready_topics()]
        self._mark_ready(await release.with_ready_tasks(self._session, names))

    def _mark_ready(self, type_names: Iterable[str]) -> None:
        for name in type_names:
            if (topic := self.topics.get(name)) is not None:
                topic.may_have_ready = True

    async def _sleep(self, until_s: float) -> None:
        self._begin_step("")
        with suppress(TimeoutError):
            async with asyncio.timeout_at(None if until_s == float("inf") else until_s):
                await self._wake.wait()

    def _poll(self) -> None:
        """Begins the polls that are due; acts on those that have ended."""
        for topic in self._lag_poller.take_polled():
            if self.topics.get(topic.type.name) is not topic:
                continue
            if topic.failure is None:
                self._withdrawal.step(topic)
            else:
                self.topics.reopen(topic, topic.failure)
        self._lag_poller.begin_due(self.topics.ready_topics())

    async def _release_batches(self) -> None:
        """Releases at most one batch of each type."""
        now_s = asyncio.get_running_loop().time()
        for topic in self.topics.ready_topics():
            if not topic.may_have_ready or topic.type.name in self._writer:
                continue
            self._begin_step(f"releasing {topic.type.name}")
            room = topic.room()
            if room <= 0:
                continue
            if attempt_ids := topic.pace.due(now_s):
                topic.pace.observe(await release.durations_s(self._session, attempt_ids))
            limit = min(room, self._settings.release_batch)
            # Before the statement: the next release must see tasks that become ready while it runs.
            topic.may_have_ready = False
            result = await self._limiter.release(topic.type, limit, self._notes.take_confirmed)
            topic.may_have_ready = topic.may_have_ready or result.more
            if result.batch is not None:
                self._pace.add(len(result.batch.tasks), now_s, more=result.more)
                self.cutoffs.on_queued(topic)
                await self._writer.write(topic, [result.batch])
