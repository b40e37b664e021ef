"""Faust made safe: the one adapter under the heartbeats, stages and callbacks processors.

What Faust 0.15.3 does when left alone, and what is done about it here
- It commits past a record that is still in hand: when records are acknowledged out of order, when it skips a
  message of an old generation, and over what it takes for a gap. Here Faust acknowledges and commits nothing
  (`faust_app`); `core.acknowledgement` says up to where all is settled, and that is committed.
- After a rebalance it may go on behind records it has thrown away: a fetch that is under way loses its set of
  partitions, and a partition without a committed offset is not rewound. Here every partition is sought to where its
  generation starts, and must go on from there offset by offset. At a jump the broker is asked; if it has what was
  jumped over, the process ends and the next one starts from the committed offset.
- Nothing bounds what is in hand. Here nothing more is taken while `max_in_flight` records are.
- An exception that leaves an agent acknowledges the record and loses it. Here none leaves: a record that breaks
  its contract is parked on `<topic>.rejected`, a server that is away is waited for with the record in hand, and
  anything else ends the process with the record unacknowledged, so that it is delivered again.
- `concurrency` above 1 loses records: there is one agent a topic.
- It can hang (in a rebalance, in recovery, on a partition, on stop) and stay alive, and a crash of one of its
  parts does not end it. `lookout` and `watchdog` end the process.
- Its own rebalance callbacks hold up the whole group while they run. Hooks run after it, before the first record.
- It waits for ever for a topic that does not exist. Topics are asked for first.
- `sys.exit` in an agent is swallowed, SIGTERM is its worker's: it runs embedded in the running loop, and
  `penstock.process` has the signals.

In doubt it redelivers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from aiokafka import AIOKafkaProducer

from penstock.core.acknowledgement import Arrival, Hand, Partition
from penstock.core.retry import RetryPolicy
from penstock.errors import Fatal, Invalid, KafkaUnavailable, SessionLost, Unavailable
from penstock.kafka.connection import make_producer, running
from penstock.kafka.delivery import Delivery, Handler, ProcessorSettings, park
from penstock.kafka.faust_app import FaustApp
from penstock.kafka.figures import ProcessorFigures
from penstock.kafka.lookout import LookOut
from penstock.kafka.observer import Observer, observing
from penstock.kafka.topics import Topic
from penstock.kafka.watchdog import LoopWatchdog

__all__ = ["Delivery", "Handler", "Hook", "Processor", "ProcessorSettings"]

log = logging.getLogger(__name__)

WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.1, factor=2, max_s=2.0, jitter=0.3)
# Offsets are committed this often; a crash redelivers at most what was settled since.
COMMIT_EVERY_S = 0.5
# How long a drain waits for what is in hand; `penstock.process` ends the process a little later.
DRAIN_S = 30.0
# Faust stops in 0.2 s, or hangs.
STOP_S = 15.0
# A commit beside a rebalance or a stop is a courtesy (fewer repeats): not worth waiting longer for.
LAST_COMMIT_S = 2.0

Hook = Callable[[frozenset[Partition]], Awaitable[None]]


class Processor:
    """Runs handlers over topics. One process runs one processor, once.

    Args:
        settings: where, and the bounds.
        name: of the service; its group's name, too.
        handlers: one a topic, called in the order of each partition, one record at a time. It may return before
            its record is settled. It may raise `Invalid` (the record is parked) or `Unavailable` (it is called
            again with the same record, after a while); anything else it raises ends the processor.
        on_assigned: told (topic, partition) of what is this process's now and may have been another's before,
            before the first record of it. Called again while it raises `Unavailable`.
        on_revoked: told of what may have been another's since; what is this process's again is in the
            `on_assigned` that follows.
        under_way: how much is still being done for records that are settled already: a stop waits for that, too.
        linger_s: how long records may wait for others, so that many are taken at once; 0 for where they are urgent.

    Attributes:
        figures: what it counts of itself.
    """

    def __init__(
        self,
        settings: ProcessorSettings,
        name: str,
        handlers: Mapping[Topic, Handler],
        *,
        on_assigned: Hook | None = None,
        on_revoked: Hook | None = None,
        under_way: Callable[[], int] = lambda: 0,
        linger_s: float = 0.0,
    ) -> None:
        self._settings = settings
        self._name = name
        self._handlers = handlers
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._under_way = under_way
        self._linger_s = linger_s
        self._hand = Hand(settings.max_in_flight)
        self._owned: frozenset[Partition] = frozenset()
        self._owned_generation = -1
        # Topics whose agent is with a record (or waits for room for one), and not for one.
        self._busy: set[str] = set()
        self._room = asyncio.Event()
        self._assigned = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._failed = asyncio.Event()
        self._committing = asyncio.Lock()
        self._watchdog = LoopWatchdog()
        self.figures = ProcessorFigures(self._hand, (topic.name for topic in handlers))
        # Set by `run`.
        self._app: FaustApp
        self._observer: Observer
        self._producer: AIOKafkaProducer | None = None

    def fail(self, error: BaseException) -> None:
        """Ends the processor with an error; what is in hand stays unacknowledged. The first one counts."""
        self._closed = True
        if self._error is None:
            # What would end the interpreter (sys.exit) must not end it with status 0.
            self._error = error if isinstance(error, Exception) else Fatal(f"a handler raised {error!r}")
        self._failed.set()

    def settle(self, delivery: Delivery) -> None:
        """See `Delivery.settle`."""
        hand = self._hand
        hand.settle(delivery.generation, (delivery.topic, delivery.partition), delivery.offset)
        if not hand.full:
            self._room.set()

    async def ends(self) -> dict[Partition, int]:
        """Where the partitions that are read here end now: the offsets behind their newest records.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        return await self._observer.ends(self._hand.expected())

    def expected(self) -> dict[Partition, int]:
        """The offset that comes next of each partition that is read here; handlers have been given all before it."""
        return self._hand.expected()

    async def probe(self) -> None:
        """Does nothing while it is in its group and reads.

        Raises:
            KafkaUnavailable: it is joining, or the group rebalances.
        """
        is_in = self._assigned.is_set() and self._hand.generation == self._app.generation
        if not is_in or self._app.rebalancing:
            raise KafkaUnavailable(f"joining the group {self._settings.prefix}{self._name}")

    async def reject(
        self, delivery: Delivery, invalid: Invalid, part: bytes | None = None, *, settle: bool = True
    ) -> None:
        """Parks a record, or a part of it, on `<topic>.rejected`, then settles it.

        Args:
            delivery: the record.
            invalid: what is wrong with it.
            part: what is parked in place of the whole record.
            settle: False when the rest of the record is still to be done.

        Raises:
            KafkaUnavailable: it is not parked.
        """
        assert self._producer is not None, "the processor is not running"
        topic = self._settings.prefix + delivery.topic
        log.warning(
            "rejected %s/%d@%d: %s", topic, delivery.partition, delivery.offset, invalid, extra=delivery.ids()
        )
        await park(self._producer, self._settings.prefix, delivery, invalid, part)
        self.figures.rejected[delivery.topic] += 1
        if settle:
            delivery.settle()

    async def run(self, stopping: asyncio.Event, ready: Callable[[], None]) -> None:
        """Runs until `stopping` is set and what is in hand is settled.

        Raises:
            Exception: whatever a handler or hook could not deal with, or `fail` was given.
            SessionLost: Faust gave up or skipped records.
            Stalled: something that should move did not for `stall_timeout_s`.
            KafkaUnavailable: no broker answered, or a topic does not exist.
        """
        async with AsyncExitStack() as stack:
            self._producer = await stack.enter_async_context(running(make_producer(self._settings)))
            self._observer = await stack.enter_async_context(observing(self._settings))
            await self._observer.require(topic.name for topic in self._handlers)
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            self._app = self._make_app(folder)
            stack.enter_context(self._watchdog.guard())
            lookout = LookOut(
                self._name,
                self._settings.stall_timeout_s,
                self._app,
                self._observer,
                self._hand,
                self._busy,
                self._watchdog,
                self.figures.lag,
            )
            attendants = [
                asyncio.create_task(self._attend(work))
                for work in (lookout.look, lookout.measure, self._commit_now_and_then)
            ]
            try:
                await self._unless_failed(self._start())
                ready()
                await self._unless_failed(stopping.wait())
                await self._unless_failed(self._drain())
            finally:
                self._closed = True
                for task in attendants:
                    task.cancel()
                await asyncio.gather(*attendants, return_exceptions=True)
                self._watchdog.wind(STOP_S)
                await self._last_commit()
                await self._app.stop()

    async def _start(self) -> None:
        await self._app.start()
        await self._assigned.wait()

    async def _unless_failed(self, work: Awaitable[Any]) -> None:
        """Awaits `work`, or raises as soon as the processor has failed."""
        task, failed = asyncio.ensure_future(work), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
            task.result()
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    async def _attend(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 (it is raised by `run`)
            self.fail(error)

    async def _drain(self) -> None:
        self._closed = True
        deadline_s = time.monotonic() + DRAIN_S
        while (len(self._hand) or self._under_way()) and time.monotonic() < deadline_s:  # noqa: ASYNC110 (once in a process's life)
            await asyncio.sleep(0.01)
        if len(self._hand):
            log.warning(
                "%s: %d records were not settled; they are delivered again", self._name, len(self._hand)
            )

    def _make_app(self, folder: str) -> FaustApp:
        agents = {
            topic.name: self._make_agent(topic.name, handler) for topic, handler in self._handlers.items()
        }
        return FaustApp(
            self._settings,
            self._name,
            folder,
            agents,
            stall_timeout_s=self._settings.stall_timeout_s,
            before_rebalance=self._last_commit,
            after_rebalance=partial(self._attend, self._begin_generation),
            linger_s=self._linger_s,
        )

    def _make_agent(self, topic: str, handler: Handler) -> Callable[[Any], Awaitable[None]]:
        async def consume(stream: Any) -> None:
            events: AsyncIterator[Any] = stream.events()
            async for event in events:
                self._busy.add(topic)
                try:
                    await self._take(topic, handler, event.message)
                except asyncio.CancelledError:
                    # Nothing but our own stop may do that; Faust would go on with the next record.
                    self.fail(SessionLost(f"{self._name}: Faust has cancelled an agent"))
                    raise
                except BaseException as error:  # noqa: BLE001 (none may leave an agent; `run` raises it)
                    self.fail(error)
                if self._closed:
                    # What Faust has buffered is not in hand: it is delivered again, to the next process.
                    await asyncio.Event().wait()
                self._busy.discard(topic)

        return consume

    async def _take(self, topic: str, handler: Handler, message: Any) -> None:
        hand = self._hand
        while hand.full and not self._closed:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            return
        partition, generation = (topic, message.partition), message.generation_id
        arrival = hand.arrive(generation, partition, message.offset)
        if arrival is Arrival.AHEAD:
            await self._confirm_gap(partition, hand.expected()[partition], message.offset)
            hand.skip_to(generation, partition, message.offset)
            arrival = hand.arrive(generation, partition, message.offset)
        if arrival is not Arrival.NEXT:
            return
        delivery = Delivery(self.settle, topic, message)
        try:
            await self._insist(partial(handler, delivery), generation)
        except Invalid as invalid:
            await self._insist(partial(self.reject, delivery, invalid), generation)

    async def _insist(self, work: Callable[[], Awaitable[None]], generation: int) -> bool:
        """Tries `work` until no server is away; False when the generation ended before that."""
        tries = 0
        while self._app.generation == generation:
            try:
                await work()
                return True
            except Unavailable as error:
                tries += 1
                self.figures.waits += 1
                log.warning("%s waits: %s", self._name, error)
                await asyncio.sleep(WHILE_AWAY.delay_s(tries, random.random()))  # noqa: S311 (jitter)
        return False

    async def _confirm_gap(self, partition: Partition, expected: int, offset: int) -> None:
        """Makes sure that records `expected` to `offset` do not exist (deleted, or a transaction's marks)."""
        found: int | None = None

        async def look() -> None:
            nonlocal found
            found = await self._observer.first_from(partition, expected)

        if await self._insist(look, self._hand.generation) and (found is None or found < offset):
            raise SessionLost(f"Faust has skipped {partition[0]}/{partition[1]} from {expected} to {offset}")

    async def _begin_generation(self) -> None:
        generation = self._app.generation
        # A commit that is under way would move Faust's start after it was asked for.
        async with self._committing:
            starts = await self._find_starts(generation)
            if starts is None:
                return
            self._hand.begin(generation, starts)
            self.figures.generations += 1
        self._room.set()
        now = frozenset(starts)
        # A generation that passed without us (stuck, or superseded) may have had another owner.
        kept = now & self._owned if generation <= self._owned_generation + 1 else frozenset()
        gone, came = self._owned - kept, now - kept
        log.info("%s: generation %d, partitions %s", self._name, generation, sorted(now))
        if self._on_revoked and gone:
            await self._on_revoked(gone)
        self._owned, self._owned_generation = kept, generation
        hook = self._on_assigned
        if hook and came and not await self._insist(partial(hook, came), generation):
            return
        self._owned = now
        self._assigned.set()

    async def _find_starts(self, generation: int) -> dict[Partition, int] | None:
        """Where each partition goes on, by the broker; None when another generation has begun meanwhile."""
        while self._app.generation == generation:
            try:
                committed = await self._app.rewind()
                beginnings, ends = await self._observer.bounds(committed)
                starts = {
                    partition: offset if offset is not None and first <= offset <= ends[partition] else first
                    for partition, offset in committed.items()
                    for first in (beginnings[partition],)
                }
                await self._app.seek(starts)
            except Unavailable as error:
                log.info("%s: asks again where to go on: %s", self._name, error)
                await asyncio.sleep(0.1)
                continue
            return starts
        return None

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_EVERY_S)
            await self._commit()

    async def _last_commit(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._commit(), LAST_COMMIT_S)

    async def _commit(self) -> None:
        async with self._committing:
            offsets = self._hand.committable()
            if offsets and await self._app.commit(offsets):
                self._hand.committed(offsets)
