"""Makes Faust safe: the one adapter under the heartbeats, stages and callbacks processors.

What Faust 0.15.3 does by itself, and the measure taken here
- It commits past a record that is still in flight: when records are acknowledged out of order, when
  it skips a message of an old generation, and over gaps that it assumes. Here Faust acknowledges
  and commits nothing (`faust_app`). `core.offset_tracker` knows the offset up to which all records
  are settled, and that is committed.
- After a rebalance it may read on behind records that it has discarded: a fetch in progress loses
  its set of partitions, and a partition without a committed offset is not rewound. Here every
  partition is sought to where its generation starts, and must be read offset by offset. At a gap
  the broker is asked for the skipped records. If it has any the process ends, and the next one
  starts from the committed offset.
- It does not limit the records in flight. Here no more than `max_in_flight` are taken.
- An exception that leaves an agent acknowledges the record and loses it. Here none leaves. A record
  that breaks its contract is copied to `<topic>.rejected`. While a server is unavailable the record
  is retried. Any other error ends the process with the record unacknowledged, so that it is
  delivered again.
- `concurrency` above 1 loses records: there is one agent a topic.
- It can hang, and crash in a part, and stay alive. A stall detector and a watchdog end it.
- Its own rebalance callbacks block the whole group while they run. Here hooks run after it, before
  the first record.
- It waits forever for a topic that does not exist. Here the broker is asked for the topics first.
- It swallows `sys.exit` in an agent, and its worker takes SIGTERM. Here `penstock.process` handles
  the signals.

When in doubt, it redelivers. It is one module, because each measure depends on the others.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from aiokafka import AIOKafkaProducer

from penstock.concurrency.cancellation import cleanup_timeout
from penstock.concurrency.retry import SERVICE_BACKOFF, STARTUP_BACKOFF, retry_until_available
from penstock.concurrency.stall_detector import LoopWatchdog, StallDetector
from penstock.core.offset_tracker import Arrival, OffsetTracker, Partition
from penstock.core.retry import Backoff
from penstock.errors import Fatal, Invalid, KafkaUnavailable, SessionLost, Unavailable
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.fetch_wait import no_gap
from penstock.kafka.client.offset_reader import OffsetReader, observing
from penstock.kafka.processing.delivery import Delivery, Handler, ProcessorSettings, write_rejection
from penstock.kafka.processing.faust_app import FaustApp
from penstock.kafka.processing.metrics import ProcessorMetrics
from penstock.kafka.processing.progress import progress_of
from penstock.kafka.processing.unread import UnreadPartitions
from penstock.kafka.topology.topics import Topic

__all__ = ["Delivery", "Handler", "Hook", "Processor", "ProcessorSettings"]

log = logging.getLogger(__name__)

# Seconds between two commits of offsets; a crash redelivers at most what was settled since.
COMMIT_EVERY_S = 0.5
# How long a drain waits for records in flight; `penstock.process` ends the process a little later.
DRAIN_S = 30.0
# Faust stops in 0.2 s. A consumer that cannot leave its group takes up to 15 s.
STOP_S = 20.0
# A commit before a rebalance or a stop only saves repeats, so it must not delay them.
LAST_COMMIT_S = 2.0

Hook = Callable[[frozenset[Partition]], Awaitable[None]]


class Processor:
    """Runs handlers over topics. One process runs one processor, once.

    Args:
        settings: where, and the bounds.
        name: of the service; its group's name, too.
        handlers: one a topic, called in the order of each partition, one record at a time. It may
            return before its record is settled. It may raise `Invalid` (the record is rejected) or
            `Unavailable` (it is called again with the same record, after a while); anything else it
            raises ends the processor.
        on_assigned: called with the (topic, partition) that this process has now and another may
            have had before, before their first records. It is called again while it raises
            `Unavailable`.
        on_revoked: called with the partitions that another process may have had since; those that
            this process has again follow in `on_assigned`.
        in_flight: the work that is left for settled records; a stop waits until it is 0.
        gap_s: see `FetchWait`; how long records may wait for others, at the load of now, so that
            many are taken at once.
        servers: see `StallDetector`.

    Attributes:
        metrics: counted here.
    """

    def __init__(
        self,
        settings: ProcessorSettings,
        name: str,
        handlers: Mapping[Topic, Handler],
        *,
        on_assigned: Hook | None = None,
        on_revoked: Hook | None = None,
        in_flight: Callable[[], int] = lambda: 0,
        gap_s: Callable[[], float] = no_gap,
        servers: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self._settings = settings
        self._name = name
        self._handlers = handlers
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._in_flight = in_flight
        self._gap_s = gap_s
        self._servers = servers
        self._tracker = OffsetTracker(settings.max_in_flight)
        self._owned: frozenset[Partition] = frozenset()
        self._owned_generation = -1
        # Topics whose agent has a record, or waits for room for one.
        self._busy: set[str] = set()
        self._room = asyncio.Event()
        self._assigned = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._failed = asyncio.Event()
        self._committing = asyncio.Lock()
        self._reject_part = partial(self.reject, settle=False)
        self._watchdog = LoopWatchdog()
        self.metrics = ProcessorMetrics(self._tracker, [t.name for t in handlers], settings.prefix)
        # Set by `run`.
        self._app: FaustApp
        self._offsets: OffsetReader
        self._producer: AIOKafkaProducer | None = None

    def fail(self, error: BaseException) -> None:
        """Ends the processor with its first error; records in flight stay unacknowledged."""
        self._closed = True
        if self._error is None:
            # `sys.exit` in a handler must not end the process with status 0.
            self._error = error if isinstance(error, Exception) else Fatal(f"a handler raised {error!r}")
        self._failed.set()

    def settle(self, delivery: Delivery) -> None:
        """See `Delivery.settle`."""
        partition = (delivery.topic, delivery.partition)
        self._tracker.settle(delivery.generation, partition, delivery.offset)
        if not self._tracker.full:
            self._room.set()

    async def ends(self) -> dict[Partition, int]:
        """The ends of the partitions that are read here: the offsets behind their newest records.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        return await self._offsets.ends(self._tracker.expected())

    def expected(self) -> dict[Partition, int]:
        """The next offset of each partition; handlers have had all records before it."""
        return self._tracker.expected()

    async def probe(self) -> None:
        """Raises `KafkaUnavailable` while the processor joins its group or rebalances."""
        joined = self._assigned.is_set() and self._tracker.generation == self._app.generation
        if not joined or self._app.rebalancing:
            raise KafkaUnavailable(f"joining the group {self._settings.prefix}{self._name}")

    async def reject(
        self, delivery: Delivery, invalid: Invalid, part: bytes | None = None, *, settle: bool = True
    ) -> None:
        """Copies a record, or a part of it, to `<topic>.rejected`, then settles it.

        Args:
            delivery: the record.
            invalid: its fault.
            part: copied in place of the whole record.
            settle: False if the rest of the record is still to be processed.

        Raises:
            KafkaUnavailable: it is not copied.
        """
        assert self._producer is not None, "the processor is not running"
        log.warning(
            "A record breaks its contract; copying it to the rejected topic",
            extra={"event": "delivery_rejected", **delivery.ids(), "error": str(invalid)},
        )
        await write_rejection(self._producer, self._settings.prefix, delivery, invalid, part)
        self.metrics.rejected[delivery.topic] += 1
        if settle:
            delivery.settle()

    async def run(self, stopping: asyncio.Event, ready: Callable[[], None]) -> None:
        """Runs until `stopping` is set and all records in flight are settled.

        Raises:
            Exception: an error of a handler or hook that no retry helps, or that `fail` was given.
            SessionLost: Faust stopped or skipped records. Fatal: the consumer does not end.
            Stalled: something made no progress for `stall_timeout_s`.
            KafkaUnavailable: no broker answered, or a topic does not exist.
        """
        limit_s = self._settings.stall_timeout_s
        async with AsyncExitStack() as stack:
            self._producer = await stack.enter_async_context(running(make_producer(self._settings)))
            self._offsets = await stack.enter_async_context(observing(self._settings))
            await self._offsets.require(topic.name for topic in self._handlers)
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            self._app = app = self._make_app(folder)
            stack.enter_context(self._watchdog.guard())
            stack.push_async_callback(app.stop)  # After any error: a member that stays keeps partitions.
            unread = UnreadPartitions(
                self._offsets,
                self._tracker.expected,
                lambda partition: partition[0] in self._busy,
                self.metrics.set_lag,
                every_s=limit_s / 6,
            )
            detector = StallDetector(
                limit_s,
                lambda: progress_of(app, self._tracker, self._busy, unread.stalled),
                self._servers,
                name=self._name,
            )
            attendants = [
                asyncio.create_task(self._attend(work))
                for work in (
                    partial(self._watchdog.run, limit_s),
                    app.watch,
                    detector.run,
                    unread.run,
                    self._commit_periodically,
                )
            ]
            try:
                await self._unless_failed(self._app.start())
                await self._unless_failed(self._assigned.wait())
                ready()
                await self._unless_failed(stopping.wait())
                await self._unless_failed(self._drain())
            finally:
                self._closed = True
                self._watchdog.rewind(STOP_S)
                for task in attendants:
                    task.cancel()
                await asyncio.gather(*attendants, return_exceptions=True)
                await self._last_commit()

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
        except Exception as error:  # noqa: BLE001 (raised by `run`)
            self.fail(error)

    async def _drain(self) -> None:
        self._closed = True
        deadline_s = time.monotonic() + DRAIN_S
        while (len(self._tracker) or self._in_flight()) and time.monotonic() < deadline_s:  # noqa: ASYNC110 (once in a process's life)
            await asyncio.sleep(0.01)
        if len(self._tracker):
            log.warning(
                "Records were not settled in time; they are delivered again",
                extra={"event": "drain_timed_out", "processor": self._name, "records": len(self._tracker)},
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
            gap_s=self._gap_s,
        )

    def _make_agent(self, topic: str, handler: Handler) -> Callable[[Any], Awaitable[None]]:
        async def consume(stream: Any) -> None:
            events: AsyncIterator[Any] = stream.events()
            async for event in events:
                self._busy.add(topic)
                try:
                    await self._take(topic, handler, event.message)
                except asyncio.CancelledError:
                    # Only our own stop may cancel an agent; after any other Faust would skip the
                    # record.
                    self.fail(SessionLost(f"{self._name}: Faust has cancelled an agent"))
                    raise
                except BaseException as error:  # noqa: BLE001 (`run` raises it, so that nothing is acknowledged; none may leave an agent)
                    self.fail(error)
                if self._closed:
                    # Records in Faust's buffers are not in flight: the next process reads them.
                    await asyncio.Event().wait()
                self._busy.discard(topic)

        return consume

    async def _take(self, topic: str, handler: Handler, message: Any) -> None:
        tracker = self._tracker
        while tracker.full and not self._closed:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            return
        partition, generation = (topic, message.partition), message.generation_id
        arrival = tracker.arrive(generation, partition, message.offset)
        if arrival is Arrival.AHEAD:
            expected = tracker.expected()[partition]
            confirm = partial(self._offsets.confirm_gap, partition, expected, message.offset)
            await self._retry(confirm, tracker.generation)
            tracker.skip_to(generation, partition, message.offset)
            arrival = tracker.arrive(generation, partition, message.offset)
        if arrival is not Arrival.NEXT:
            return
        delivery = Delivery(self.settle, self._reject_part, topic, message)
        try:
            await self._retry(partial(handler, delivery), generation)
        except Invalid as invalid:
            await self._retry(partial(self.reject, delivery, invalid), generation)

    async def _retry(
        self, work: Callable[[], Awaitable[None]], generation: int, backoff: Backoff = SERVICE_BACKOFF
    ) -> bool:
        """Does `work` until no server is unavailable; False if the generation ended first."""

        async def attempt() -> bool:
            if self._app.generation != generation:
                return False
            try:
                await work()
            except Unavailable:
                self.metrics.waits += 1
                raise
            return True

        return await retry_until_available(attempt, waiting_for=f"processor {self._name}", backoff=backoff)

    async def _begin_generation(self) -> None:
        generation = self._app.generation
        # A commit that is on its way would move Faust's start after the broker was asked for it.
        async with self._committing:
            starts: dict[Partition, int] = {}

            async def seek() -> None:
                nonlocal starts
                starts = await self._app.seek_starts(self._offsets)

            if not await self._retry(seek, generation, STARTUP_BACKOFF):
                return
            self._tracker.begin(generation, starts)
            self.metrics.generations += 1
        self._room.set()
        assigned = frozenset(starts)
        # After a generation without this process (stuck, or superseded) all partitions may have had
        # another owner.
        kept = assigned & self._owned if generation <= self._owned_generation + 1 else frozenset()
        revoked, added = self._owned - kept, assigned - kept
        log.info(
            "A generation of the consumer group has begun",
            extra={
                "event": "generation_begun",
                "processor": self._name,
                "generation": generation,
                "partitions": [f"{topic}/{number}" for topic, number in sorted(assigned)],
            },
        )
        if self._on_revoked and revoked:
            await self._on_revoked(revoked)
        self._owned, self._owned_generation = kept, generation
        hook = self._on_assigned
        if hook and added and not await self._retry(partial(hook, added), generation):
            return
        self._owned = assigned
        self._assigned.set()

    async def _commit_periodically(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_EVERY_S)
            await self._commit()

    async def _last_commit(self) -> None:
        with suppress(TimeoutError):
            async with cleanup_timeout(LAST_COMMIT_S):
                await self._commit()

    async def _commit(self) -> None:
        async with self._committing:
            offsets = self._tracker.committable()
            if offsets and await self._app.commit(offsets):
                self._tracker.committed(offsets)
