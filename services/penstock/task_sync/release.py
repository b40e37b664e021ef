"""The release loop: owns types and releases their tasks, as windows and limits allow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from penstock.contracts.task_type import TaskType
from penstock.core.completion import Fence
from penstock.core.release_pace import ReleasePace
from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.postgres import release
from penstock.postgres.ownership import Ownership
from penstock.postgres.release import TYPES
from penstock.postgres.session import Session
from penstock.postgres.types import TypeCache
from penstock.task_sync.lag_poller import LagPoller
from penstock.task_sync.limits import ReleaseLimiter
from penstock.task_sync.promotion import Promotion
from penstock.task_sync.ready_topics import ReadyTopic
from penstock.task_sync.ready_writer import ReadyWriter
from penstock.task_sync.settings import TaskSyncSettings
from penstock.task_sync.topic_opener import HeldReason, TopicOpener
from penstock.task_sync.withdrawal import Withdrawal

log = logging.getLogger(__name__)

# The next release deletes the notes of confirmed batches; without one, a statement of its own
# deletes them after this time.
DELETE_NOTES_S = 0.5


class ReleaseLoop:
    """The loop that owns types and releases their tasks.

    Args:
        settings: of the service.
        session: holds the locks of the owned types; every release goes through it.
        producer: acks=all.
        types: the registered types.
        admin: reads the workers' committed offsets.
        end_offsets: reads the end offsets of ready topics.
        fail: ends tasks whose records Kafka refuses, each with the reason.

    Attributes:
        may_have_queued: set while a task of an owned type may be queued.
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
        self._types = types
        self._ownership = Ownership(session, TYPES, settings.own_retry_s)
        self._topics: dict[str, ReadyTopic] = {}
        self._wake = asyncio.Event()
        self._lag_poller = LagPoller(settings, session, admin, end_offsets, producer, self._wake.set)
        self._limiter = ReleaseLimiter(session, self.on_ready)
        self._opener = TopicOpener(settings, admin, self._lag_poller, end_offsets, producer, self._wake.set)
        self._withdrawal = Withdrawal(
            settings, session, producer, admin, self._lag_poller, self._on_withdrawal_ended
        )
        self._writer = ReadyWriter(producer, settings.lag_poll_s, self._wake.set, fail)
        self._pace = ReleasePace()
        self._types_changed = self._owners_changed = True
        # Types that notifications named since types were loaded.
        self._changed_types: set[str] = set()
        self._promotion = Promotion(session, settings.release_batch)
        # Progress for the stall detector: the loop's step, empty while it sleeps, and a counter.
        self._step = ""
        self._step_count = 0
        self._cutoffs_request: tuple[Sequence[str], asyncio.Future[dict[str, str]]] | None = None
        self.may_have_queued = asyncio.Event()

    def on_ready(self, type_name: str) -> None:
        """A task of the type may have become ready."""
        topic = self._topics.get(type_name)
        if topic is not None:
            topic.may_have_ready = True
            self._limiter.on_ready(type_name)
        self._wake.set()

    def on_due_changed(self, _type_name: str) -> None:
        """A task was scheduled, perhaps for an earlier moment than all others."""
        self._promotion.changed = True
        self._wake.set()

    def on_type_changed(self, name: str) -> None:
        """A type, or settings of its keys, were registered or changed."""
        self._types.mark_outdated()
        self._changed_types.add(name)
        self._types_changed = True
        self._wake.set()

    def on_replicas_changed(self, _payload: str) -> None:
        """A replica joined, left or transferred types."""
        self._owners_changed = True
        self._wake.set()

    def _on_withdrawal_ended(self) -> None:
        # Its type may have to be transferred, and the withdrawn tasks are to be released.
        self._owners_changed = self._owners_changed or not self._ownership.alone
        self._wake.set()

    def ready_topics(self) -> list[ReadyTopic]:
        """The ready topics of the types that are owned now."""
        return list(self._topics.values())

    def held(self) -> dict[str, HeldReason]:
        """The owned types that wait for their ready topic or its lag, with the reason."""
        unknown = (name for name, topic in self._topics.items() if topic.lag_failure is not None)
        return dict.fromkeys(unknown, HeldReason.LAG_UNKNOWN) | self._opener.held

    def queued_types(self) -> list[TaskType]:
        """Owned types that may have queued tasks."""
        return [topic.type for topic in self._topics.values() if topic.may_have_queued]

    def progress(self) -> dict[str, Hashable]:
        """Work in progress, each with a value that changes as it advances; empty at rest.

        A full window is rest, because it waits for workers.
        """
        # A statement that waits for another transaction is repeated.
        step_value = (self._step_count, self._session.lock_conflicts)
        progress: dict[str, Hashable] = {self._step: step_value} if self._step else {}
        parts = (self._opener, self._writer, self._withdrawal, self._lag_poller)
        return progress | {name: value for part in parts for name, value in part.progress().items()}

    def _begin_step(self, step: str) -> None:
        self._step = step
        self._step_count += 1

    async def queued_cutoffs(self, type_names: Sequence[str]) -> dict[str, str]:
        """As `postgres.release.queued_cutoffs`, run between two releases; one request at a time."""
        future: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._cutoffs_request = (type_names, future)
        self._wake.set()
        return await future

    def on_topic_replaced(self, type_name: str, ends: Mapping[int, int]) -> None:
        """A ready topic was replaced by a new one with these ends; all its records are untaken."""
        topic = self._topics.get(type_name)
        if topic is not None:
            self._withdrawal.cancel(type_name)
            topic.partitions.start(ends, asyncio.get_running_loop().time())
            topic.poll_interval_s = 0.0
            topic.begins, topic.invalid, topic.bounds_s = {}, {}, float("-inf")
            topic.may_have_ready = True
            self._wake.set()

    def on_markers_written(self, type_name: str, partitions: Iterable[int]) -> None:
        """A record without a task was written to each of these partitions of a ready topic."""
        topic = self._topics.get(type_name)
        if topic is not None:
            for number in partitions:
                topic.partitions.add(number, 1, asyncio.get_running_loop().time())

    async def run(self, stopping: asyncio.Event) -> None:
        """Releases until `stopping` is set; then waits until Kafka has every released task.

        Raises:
            SessionLost: the locks are lost; another replica may release these types by now.
            PostgresUnavailable, KafkaUnavailable: the next owner sends again what Kafka has not
                confirmed.
        """
        await self._ownership.join()
        wakers = [asyncio.create_task(self._wake_on(event)) for event in (stopping, self._session.lost)]
        try:
            await self._release_until(stopping)
            await self._writer.drain()
        finally:
            for waker in wakers:
                waker.cancel()
            self._limiter.close()
            await self._lag_poller.stop()
            await self._withdrawal.stop()
            await self._opener.stop()
            await self._writer.stop()
        await self._delete_notes()
        # Notifies the other replicas, which would otherwise notice at their next poll.
        await self._ownership.leave()

    async def _release_until(self, stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        assign_at_s = due_at_s = loop.time()
        sweep_at_s = loop.time() + self._settings.sweep_s
        while not stopping.is_set():
            self._wake.clear()
            self._session.ensure()
            self._writer.raise_failure()
            self._withdrawal.raise_failure()
            for topic, error in self._writer.take_failed():
                self._reopen(topic, error)
            self._opener.end_holds(self._topics, self._writer.has_unconfirmed)
            now_s = loop.time()
            if now_s >= sweep_at_s:
                self._begin_step("sweeping for lost notifications")
                await self._sweep()
                sweep_at_s = now_s + self._settings.sweep_s
            for topic in self._opener.take_opened():
                self._begin_step(f"opening {topic.type.name}")
                await self._open(topic)
                # A plan to transfer the type may have come while it was opened.
                self._owners_changed = self._owners_changed or not self._ownership.alone
            if self._types_changed or self._owners_changed or now_s >= assign_at_s:
                self._begin_step("assigning types")
                assign_at_s = await self._assign()
            if self._promotion.changed or now_s >= due_at_s:
                self._begin_step("promoting due tasks")
                promoted, due_at_s = await self._promotion.step()
                for name in self._topics.keys() & promoted:
                    # Without waiting for the notification.
                    self._topics[name].may_have_ready = True
            await asyncio.sleep(self._pace.wait_s(loop.time()))
            poll_at_s = await self._release_batches()
            self._begin_step("reading cutoffs of queued tasks")
            await self._answer_cutoffs()
            delete_at_s = self._writer.confirmed_s + DELETE_NOTES_S
            if loop.time() >= delete_at_s:
                await self._delete_notes()
                delete_at_s = float("inf")
            if any(
                topic.may_have_ready and topic.room() > 0 and name not in self._writer
                for name, topic in self._topics.items()
            ):
                continue
            await self._sleep(min(assign_at_s, due_at_s, poll_at_s, delete_at_s, sweep_at_s))

    async def _sweep(self) -> None:
        """Finds the changes whose notifications were lost."""
        self._types.mark_outdated()
        self._types_changed = self._promotion.changed = True
        for name in await release.with_ready_tasks(self._session, list(self._topics)):
            self._topics[name].may_have_ready = True

    async def _answer_cutoffs(self) -> None:
        if self._cutoffs_request is None:
            return
        (type_names, future), self._cutoffs_request = self._cutoffs_request, None
        # Types that were transferred meanwhile are left out: their new owner may be releasing now.
        owned = [name for name in type_names if name in self._topics]
        cutoffs = await release.queued_cutoffs(self._session, owned)
        for name in owned:
            topic = self._topics.get(name)
            if topic is not None:
                topic.may_have_queued = name in cutoffs
        if not self.queued_types():
            self.may_have_queued.clear()
        if not future.done():
            future.set_result(cutoffs)

    async def _delete_notes(self) -> None:
        if confirmed := self._writer.take_confirmed():
            await release.delete_notes(self._session, confirmed)

    async def _sleep(self, until_s: float) -> None:
        self._begin_step("")
        with suppress(TimeoutError):
            async with asyncio.timeout_at(None if until_s == float("inf") else until_s):
                await self._wake.wait()

    async def _wake_on(self, event: asyncio.Event) -> None:
        await event.wait()
        self._wake.set()

    async def _assign(self) -> float:
        """Acquires free types and transfers surplus ones; returns when to run again."""
        if self._types_changed:
            await self._load_types()
        self._owners_changed = False
        plan = await self._ownership.plan([task_type.name for task_type in self._types])
        # A type that is being opened, or has a withdrawal under way, is transferred later.
        if transfer := [n for n in plan.transfer if n in self._topics and n not in self._withdrawal]:
            await self._transfer(transfer)
        acquired: list[TaskType] = []
        for name in plan.acquire:
            if len(acquired) == plan.max_acquired:
                break
            self._begin_step(f"acquiring {name}")
            task_type = self._types.get(name)
            if task_type is not None and await release.lock_type(self._session, name):
                acquired.append(task_type)
        self._opener.open(acquired)
        if acquired and not self._ownership.alone:
            # The replica that transferred these types may have further ones to transfer.
            await self._ownership.notify_replicas()
        return self._ownership.next_plan_s

    async def _load_types(self) -> None:
        self._types_changed = False
        changed, self._changed_types = self._changed_types, set()
        await self._limiter.load()
        await self._types.load()
        for topic in self._topics.values():
            topic.type = self._types.get(topic.type.name) or topic.type
            # The new limits may allow tasks that the old ones did not.
            topic.may_have_ready = topic.may_have_ready or topic.type.name in changed

    async def _transfer(self, names: Sequence[str]) -> None:
        """Unlocks types for other replicas, after every batch note of this replica is deleted."""
        self._begin_step(f"transferring {', '.join(names)}")
        drained = await self._writer.drained(names)
        self._writer.raise_failure()
        await self._delete_notes()
        # A type that failed meanwhile has a note, which its new owner sends again.
        for name in drained:
            log.info(
                "Type transferred to another replica", extra={"event": "type_transferred", "task_type": name}
            )
            del self._topics[name]
            self._opener.held.pop(name, None)
            self._limiter.remove(name)
            await release.unlock_type(self._session, name)
        if drained:
            await self._ownership.notify_replicas()

    async def _open(self, topic: ReadyTopic) -> None:
        """Starts to release a type; sends the unconfirmed batches of its last owner again."""
        # The type may have changed since it was acquired.
        task_type = topic.type = self._types.get(topic.type.name) or topic.type
        self._topics[task_type.name] = topic
        self.may_have_queued.set()
        # Batches of this process that Kafka has are not sent again.
        await self._delete_notes()
        batches = await release.unconfirmed(self._session, task_type)
        for batch in batches:
            log.info(
                "Sending an unconfirmed batch again",
                extra={"event": "batch_resent", "task_type": task_type.name, "tasks": len(batch.tasks)},
            )
        if batches:
            await self._writer.write(topic, batches)
        log.info("Type acquired", extra={"event": "type_acquired", "task_type": task_type.name})

    async def _release_batches(self) -> float:
        """Releases at most one batch of each type; returns when to poll the next full window."""
        self._poll()
        now_s = asyncio.get_running_loop().time()
        for topic in self.ready_topics():
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
            result = await self._limiter.release(topic.type, limit, self._writer.take_confirmed)
            topic.may_have_ready = topic.may_have_ready or result.more
            if result.batch is not None:
                self._pace.add(len(result.batch.tasks), now_s, more=result.more)
                topic.may_have_queued = True
                self.may_have_queued.set()
                await self._writer.write(topic, [result.batch])
        return self._next_poll_s()

    def _reopen(self, topic: ReadyTopic, error: KafkaUnavailable | KafkaRefused) -> None:
        """Takes a type out of the release until its ready topic answers; others go on."""
        name = topic.type.name
        if self._topics.get(name) is topic:
            self._withdrawal.cancel(name)
            self._writer.cancel(name)
            del self._topics[name]
            self._limiter.remove(name)
            self._opener.reopen(topic.type, error)

    def _poll(self) -> None:
        """Begins the polls that are due; acts on those that have ended."""
        for topic in self._lag_poller.take_polled():
            if self._topics.get(topic.type.name) is not topic:
                continue
            if topic.failure is None:
                self._withdrawal.step(topic)
            else:
                self._reopen(topic, topic.failure)
        now_s = asyncio.get_running_loop().time()
        for name, topic in self._topics.items():
            if name not in self._lag_poller and topic.poll_at_s() <= now_s:
                self._lag_poller.begin(topic)

    def _next_poll_s(self) -> float:
        """When the next poll is due that is not under way."""
        return min(
            (topic.poll_at_s() for name, topic in self._topics.items() if name not in self._lag_poller),
            default=float("inf"),
        )
