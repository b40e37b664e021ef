"""The consumer of a type's group of workers, whose positions are checked before it reads from them.

Where each reader of a group starts:

- a valid position: there;
- no position: at the beginning. A group is new, or it had no members for longer than its offsets
  are retained; ready topics retain records for as long, so what is left was not read;
- a topic that was created again: at the beginning, because all its records are new;
- a log that lost its tail: where it was cut, not at the beginning, because the records before it
  were read: their tasks would run again;
- behind deleted records: at the oldest one that is left. Task-sync deletes the records of tasks
  that it withdraws from a busy worker, so this is neither reported nor counted.

The check runs beside the group's rebalance. aiokafka sends no heartbeat while a listener runs, and
cannot stop: over a bad link the member would lose its session, or never end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from aiokafka import ConsumerRebalanceListener, TopicPartition

from penstock.core.position import StartReason
from penstock.errors import KafkaUnavailable
from penstock.kafka.client import positions
from penstock.kafka.client.connection import translated
from penstock.kafka.client.consumer import Consumer
from penstock.settings import Kafka

# Seconds for all requests of a check. Then the reader starts again with new connections: one that
# has lost packets waits longer and longer before it repeats them.
CHECK_S = 10.0


class GroupConsumer(Consumer, ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """A member of a group, not yet started; `follow` first.

    Args:
        settings: where, and how long a session lasts.
        group: the group.
        options: see `Consumer`.
    """

    def __init__(self, settings: Kafka, group: str, **options: Any) -> None:
        super().__init__(settings, group, may_be_deleted=True, **options)
        self._checking: asyncio.Task[None] | None = None
        self._checked = False
        self._moved: dict[TopicPartition, int] = {}
        # By partition, its fetched records and when they were first seen.
        self._seen: dict[TopicPartition, tuple[object, float]] = {}

    def follow(
        self, topic: str, revoked: Callable[[], Awaitable[None]], assigned: Callable[[], None] = lambda: None
    ) -> None:
        """Subscribes to a topic.

        Args:
            topic: its full name.
            revoked: awaited before other members may read the partitions; it may commit.
            assigned: called when there are new partitions.
        """
        self._on_revoked, self._on_assigned = revoked, assigned
        self.subscribe([topic], listener=self)

    async def on_partitions_revoked(self, _revoked: Iterable[TopicPartition]) -> None:
        """Other members may read the partitions now."""
        await self._cancel_check()
        self._checked = False
        self._moved = {}
        await self._on_revoked()
        # Last: commits have the identity of their positions.
        self.guard.forget()

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Begins the check, which seeks to the checked positions."""
        await self._cancel_check()
        # In a task, because the client waits for its listener and swallows exceptions of it.
        self._checking = asyncio.create_task(self._check(assigned))
        self._on_assigned()

    async def _cancel_check(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            # Its error belongs to an assignment that is over.
            await asyncio.gather(self._checking, return_exceptions=True)
            self._checking = None

    async def stop(self) -> None:
        """Leaves the group."""
        # The client looks for no coordinator once it stops, and the check would wait for one.
        await self._cancel_check()
        await super().stop()

    async def getmany(
        self, *, timeout_ms: int, max_records: int | None = None
    ) -> dict[TopicPartition, list[Any]]:
        """As of every consumer, and nothing from positions that are not checked.

        Raises:
            KafkaUnavailable: a position could not be checked, or a log was replaced; another
                consumer starts from where it fits.
            SessionLost: the partitions moved.
        """
        if not await self.ensure(timeout_ms / 1000):
            return {}
        with translated():
            fetched: dict[TopicPartition, list[Any]] = await super().getmany(
                timeout_ms=timeout_ms, max_records=max_records
            )
        # The partitions may have moved meanwhile. Then the records are read again after the seek.
        return fetched if await self.ensure(0.0) and self._checked else {}

    async def ensure(self, timeout_s: float) -> bool:
        """Whether no check is under way; ends a reader whose logs are not those that it read.

        A reader that waits for records calls it, too: none come from a log that was replaced.

        Args:
            timeout_s: most seconds to wait for the check.

        Raises:
            KafkaUnavailable: as `getmany`.
            SessionLost: the partitions moved.
        """
        if (checking := self._checking) is not None and not checking.done():
            # At least a moment: a reader with fetched records polls again at once.
            await asyncio.wait({checking}, timeout=max(timeout_s, 0.05))
            if not checking.done():
                return False
        if (checking := self._checking) is not None and checking.done() and not checking.cancelled():
            checking.result()
        self.guard.ensure()
        if not self._checked:
            # The next assignment begins the check.
            return True
        if self._moved:
            # At once: the old offset is beyond the end, and looks as if all records were read.
            moved, self._moved = self._moved, {}
            with translated():
                await self.commit(moved)
        return True

    async def _check(self, assigned: Collection[TopicPartition]) -> None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._seek(assigned)
        except TimeoutError as error:
            raise KafkaUnavailable(
                f"Kafka: the positions of {len(assigned)} partitions could not be checked within {CHECK_S:g} s"
            ) from error

    async def _seek(self, assigned: Collection[TopicPartition]) -> None:
        with translated():
            committed = await self.committed_positions(assigned)
        starts = await positions.check(self, committed)
        positions.report(
            {tp: start for tp, start in starts.items() if start.reason is not StartReason.DELETED}
        )
        current = self.assignment()
        for tp, start in starts.items():
            if tp in current:
                self.guard.start({tp: start.position})
                self.seek(tp, start.position.offset)
        self._moved = {tp: start.position.offset for tp, start in starts.items() if start.moved}
        self._checked = True

    async def wait_fetched(self, timeout_s: float) -> bool:
        """Waits until records were fetched; returns whether `getmany` may have any now.

        It takes none, so that a reader can reserve room before it does. It counts as polling, as a
        wait in `getmany` does.

        Args:
            timeout_s: most seconds to wait.

        Raises:
            KafkaError: the group refuses this consumer.
        """
        fetcher, subscription = self._fetcher, self._subscription
        self._coordinator.check_errors()
        with subscription.fetch_context():
            if subscription.reassignment_in_progress:
                # `getmany` would wait for the assignment, with the room of other readers reserved.
                waiter = asyncio.ensure_future(subscription.wait_for_assignment())
            elif fetcher._records:  # noqa: SLF001 (the client has no method that takes nothing)
                return True
            else:
                waiter = fetcher._create_fetch_waiter()  # noqa: SLF001 (see above)
            try:
                done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
            finally:
                waiter.cancel()
        if done:
            # Raises the error of a group that refuses this consumer.
            waiter.result()
        return bool(fetcher._records) and not subscription.reassignment_in_progress  # noqa: SLF001 (see above)

    def fetched_since(self, age_s: float, now_s: float) -> list[TopicPartition]:
        """The partitions whose fetched records were there for `age_s`; their time begins anew.

        Only what an earlier call has seen counts, so a caller asks at each poll.
        """
        buffers = self._fetcher._records  # noqa: SLF001 (see `wait_fetched`)
        before = {tp: seen for tp, seen in self._seen.items() if buffers.get(tp) is seen[0]}
        aged = [tp for tp, (_buffer, at_s) in before.items() if now_s - at_s >= age_s]
        self._seen = {tp: (buffer, now_s) for tp, buffer in buffers.items()} | {
            tp: seen for tp, seen in before.items() if tp not in aged
        }
        return aged

    def drop_fetched(self, partitions: Iterable[TopicPartition] | None = None) -> None:
        """Drops records that were fetched and not returned; they are fetched again.

        Args:
            partitions: whose records; None for all.
        """
        subscription = self._subscription.subscription
        assignment = None if subscription is None else subscription.assignment
        if partitions is None:
            partitions = self._fetcher._records  # noqa: SLF001 (see `wait_fetched`)
        for partition in list(partitions):
            state = None if assignment is None else assignment.state_value(partition)
            if state is not None and state.has_valid_position:
                # A seek drops the client's buffer.
                self.seek(partition, state.position)
