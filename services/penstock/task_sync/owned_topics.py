"""The ready topics of owned types: opened, opened again after a failure, and transferred.

A type has its lock first, then an open topic, and only then it is released. A type is transferred
with nothing in transit: Kafka has its batches, and their notes are deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.postgres.ownership import Ownership
from penstock.postgres.types import TypeCache
from penstock.task_sync.batch_notes import BatchNotes
from penstock.task_sync.limits import ReleaseLimiter
from penstock.task_sync.ready_topics import ReadyTopic
from penstock.task_sync.ready_writer import ReadyWriter
from penstock.task_sync.topic_opener import HeldReason, TopicOpener
from penstock.task_sync.withdrawal import Withdrawal

log = logging.getLogger(__name__)


class OwnedTopics:
    """The owned types whose ready topics are open.

    Args:
        ownership: of the types.
        types: the registered types.
        opener: opens the topics beside the release loop.
        limiter: has a state for each type.
        writer: has the batches that Kafka has not confirmed.
        notes: of these batches.
        withdrawal: has the withdrawals under way.
        wake: called when types have changed, or a topic has.
    """

    def __init__(
        self,
        ownership: Ownership,
        types: TypeCache,
        opener: TopicOpener,
        limiter: ReleaseLimiter,
        writer: ReadyWriter,
        notes: BatchNotes,
        withdrawal: Withdrawal,
        wake: Callable[[], None],
    ) -> None:
        self._ownership = ownership
        self._types = types
        self._opener = opener
        self._limiter = limiter
        self._writer = writer
        self._notes = notes
        self._withdrawal = withdrawal
        self._wake = wake
        self._topics: dict[str, ReadyTopic] = {}
        self._types_changed = True
        # Types that notifications named since types were loaded.
        self._changed_types: set[str] = set()

    def get(self, type_name: str) -> ReadyTopic | None:
        """The topic of a type; None while it is not open."""
        return self._topics.get(type_name)

    def ready_topics(self) -> list[ReadyTopic]:
        """The topics that are open now."""
        return list(self._topics.values())

    def held(self) -> dict[str, HeldReason]:
        """The owned types that wait for their ready topic or its lag, with the reason."""
        unknown = (name for name, topic in self._topics.items() if topic.lag_failure is not None)
        return dict.fromkeys(unknown, HeldReason.LAG_UNKNOWN) | self._opener.held

    def on_type_changed(self, name: str) -> None:
        """A type, or settings of its keys, were registered or changed."""
        self._changed_types.add(name)
        self.mark_types_outdated()
        self._wake()

    def mark_types_outdated(self) -> None:
        """Makes the next `assign` load all types."""
        self._types.mark_outdated()
        self._types_changed = True

    def on_topic_replaced(self, type_name: str, ends: Mapping[int, int]) -> None:
        """A ready topic was replaced by a new one with these ends; all its records are untaken."""
        topic = self._topics.get(type_name)
        if topic is not None:
            self._withdrawal.cancel(type_name)
            topic.partitions.start(ends, asyncio.get_running_loop().time())
            topic.poll_interval_s = 0.0
            topic.begins, topic.invalid, topic.bounds_s = {}, {}, float("-inf")
            topic.may_have_ready = True
            self._wake()

    def on_markers_written(self, type_name: str, partitions: Iterable[int]) -> None:
        """A record without a task was written to each of these partitions of a ready topic."""
        topic = self._topics.get(type_name)
        if topic is not None:
            for number in partitions:
                topic.partitions.add(number, 1, asyncio.get_running_loop().time())

    @property
    def assign_due(self) -> bool:
        """Whether `assign` is to be called now."""
        return self._types_changed or self._ownership.due

    async def assign(self) -> None:
        """Acquires free types, begins to open their topics, and transfers surplus types."""
        if self._types_changed:
            await self._load_types()
        changes = await self._ownership.step([task_type.name for task_type in self._types])
        acquired = (self._types.get(name) for name in changes.acquired)
        self._opener.open([task_type for task_type in acquired if task_type is not None])
        # A type that is being opened, or has a withdrawal under way, is transferred later.
        surplus = [name for name in changes.surplus if name in self._topics and name not in self._withdrawal]
        if surplus:
            await self._transfer(surplus)

    async def open(self, topic: ReadyTopic) -> None:
        """Starts to release a type; sends the unconfirmed batches of its last owner again."""
        # The type may have changed since it was acquired.
        task_type = topic.type = self._types.get(topic.type.name) or topic.type
        self._topics[task_type.name] = topic
        batches = await self._notes.unconfirmed(task_type)
        if batches:
            await self._writer.write(topic, batches)
        log.info("Type acquired", extra={"event": "type_acquired", "task_type": task_type.name})
        # A plan to transfer the type may have come while it was opened.
        self._ownership.retry_surplus()

    def reopen(self, topic: ReadyTopic, error: KafkaUnavailable | KafkaRefused) -> None:
        """Takes a type out of the release until its ready topic answers; others go on."""
        name = topic.type.name
        if self._topics.get(name) is topic:
            self._withdrawal.cancel(name)
            self._writer.cancel(name)
            del self._topics[name]
            self._limiter.remove(name)
            self._opener.reopen(topic.type, error)

    def follow_writes(self) -> None:
        """Opens topics again that did not take a batch; ends the holds of those that took all."""
        for topic, error in self._writer.take_failed():
            self.reopen(topic, error)
        self._opener.end_holds(self._topics, self._writer.has_unconfirmed)

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
        """Transfers types to other replicas, after every batch note of this replica is deleted."""
        drained = await self._writer.drained(names)
        self._writer.raise_failure()
        await self._notes.delete()
        # A type that failed meanwhile has a note, which its new owner sends again.
        for name in drained:
            log.info(
                "Type transferred to another replica", extra={"event": "type_transferred", "task_type": name}
            )
            del self._topics[name]
            self._opener.held.pop(name, None)
            self._limiter.remove(name)
        await self._ownership.transfer(drained)
