"""Faust made safe: the one adapter under the heartbeats, stages and callbacks processors.

What Faust 0.15.3 does when left alone, and what is done about it here
- It commits past a record that is still in hand when records are acknowledged out of order. Here records are
  acknowledged strictly in order, per partition and generation (`core.acknowledgement`).
- Nothing bounds what is in hand. Here nothing more is taken while `max_in_flight` records are unsettled.
- An exception that leaves an agent acknowledges the record and loses it. Here none leaves: a record that breaks
  its contract is parked on `<topic>.rejected`, a server that is away is waited for with the record in hand, and
  anything else ends the process with the record unacknowledged, so that it is delivered again.
- `concurrency` above 1 loses records: there is one agent a topic.
- After a rebalance it reads every partition from its committed offset again, also those it kept: what was in
  hand then belongs to an old generation, and settling it does nothing.
- It can hang (in a rebalance, in recovery, on stop) and stay alive. A watchdog thread ends the process.
- `sys.exit` in an agent is swallowed, SIGTERM is its own: it runs embedded, and `penstock.process` has the signals.

In doubt it redelivers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import faust
from aiokafka import AIOKafkaProducer

from penstock.contracts.rejected import encode_rejection
from penstock.core.acknowledgement import Sequence
from penstock.core.retry import RetryPolicy
from penstock.errors import Invalid, KafkaUnavailable, SessionLost, Unavailable
from penstock.kafka.connection import make_producer, running, translated
from penstock.kafka.topics import Topic, service_group
from penstock.settings import Kafka, option

log = logging.getLogger(__name__)

EXIT_STALLED = 70
WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.1, factor=2, max_s=2.0, jitter=0.3)
# Offsets are committed this often; a crash redelivers at most what was settled since.
COMMIT_EVERY_S = 0.5
# How long a drain waits for what is in hand; `penstock.process` ends the process a little later.
DRAIN_S = 30.0

# (bare topic name, partition)
Partition = tuple[str, int]
Hook = Callable[[frozenset[Partition]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(Kafka):
    """What a processor adds to the way to Kafka."""

    max_in_flight: int = option(5_000, "Most records in hand and not settled; nothing more is taken beyond.")
    stall_timeout_s: float = option(
        60.0, "Seconds with work and without progress after which the process exits."
    )

    def validate(self) -> list[str]:
        """A rebalance takes up to a session timeout, and must not look like a stall."""
        problems = super().validate()
        if self.max_in_flight < 1:
            problems.append(f"max_in_flight={self.max_in_flight} must be at least 1")
        if self.stall_timeout_s < 2 * self.session_timeout_s:
            problems.append(
                f"stall_timeout_s={self.stall_timeout_s} must be at least twice "
                f"session_timeout_s={self.session_timeout_s}"
            )
        return problems


class Delivery:
    """One record in hand.

    Attributes:
        topic: name without the deployment's prefix.
        partition: of the topic.
        offset: in the partition.
        timestamp: the broker's, seconds since 1970.
        key: the record's key.
        value: the record's value; empty when it has none.
    """

    __slots__ = ("_event", "_hand", "key", "offset", "partition", "timestamp", "topic", "value")

    def __init__(self, topic: str, event: Any, hand: _Hand) -> None:
        message = event.message
        self.topic = topic
        self.partition: int = message.partition
        self.offset: int = message.offset
        self.timestamp: float = message.timestamp
        self.key: bytes | None = message.key
        self.value: bytes = message.value or b""
        self._event = event
        self._hand = hand

    def settle(self) -> None:
        """Its effects are durable. In any order, any number of times; ignored once its generation is over."""
        self._hand.settle(self)


Handler = Callable[[Delivery], Awaitable[None]]


class _Hand:
    """What is in hand of one partition in one generation."""

    __slots__ = ("_deliveries", "_processor", "_sequence", "over")

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._sequence = Sequence()
        self._deliveries: dict[int, Delivery] = {}
        self.over = False

    def __len__(self) -> int:
        return len(self._sequence)

    def take(self, delivery: Delivery) -> bool:
        if not self._sequence.take(delivery.offset):
            return False
        self._deliveries[delivery.offset] = delivery
        return True

    def settle(self, delivery: Delivery) -> None:
        if self.over:
            return
        free = self._sequence.settle(delivery.offset)
        for offset in free:
            self._deliveries.pop(offset)._event.ack()  # noqa: SLF001 (one adapter, two classes)
        if free:
            self._processor.progressed(len(free))


class Processor:
    """Runs handlers over topics.

    Args:
        settings: where, and the bounds.
        name: of the service; its group's name, too.
        handlers: one a topic, called in the order of each partition, one record at a time. It may return before
            its record is settled.
        on_assigned: told (topic, partition) of what is this process's now and was not before.
        on_revoked: told of what is not this process's any more.
    """

    def __init__(
        self,
        settings: ProcessorSettings,
        name: str,
        handlers: Mapping[Topic, Handler],
        *,
        on_assigned: Hook | None = None,
        on_revoked: Hook | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._handlers = handlers
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._hands: dict[Partition, _Hand] = {}
        self._assigned: frozenset[Partition] = frozenset()
        self._in_flight = 0
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._failure: asyncio.Future[None] | None = None
        self._producer: AIOKafkaProducer | None = None
        self._progress_s = self._beat_s = time.monotonic()
        self._stopped = threading.Event()

    def fail(self, error: BaseException) -> None:
        """Ends the processor with an error; what is in hand stays unacknowledged."""
        self._closed = True
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def progressed(self, records: int) -> None:
        """Records were acknowledged."""
        self._progress_s = time.monotonic()
        self._in_flight -= records
        if self._in_flight < self._settings.max_in_flight:
            self._room.set()

    async def reject(self, delivery: Delivery, invalid: Invalid, *, settle: bool = True) -> None:
        """Parks a record, or a part of it, on `<topic>.rejected`, then settles it.

        Args:
            delivery: the record.
            invalid: what is wrong with it.
            settle: False when the rest of the record is still to be done.

        Raises:
            KafkaUnavailable: it is not parked.
        """
        assert self._producer is not None, "the processor is not running"
        topic = self._settings.prefix + delivery.topic
        log.warning("rejected %s/%d@%d: %s", topic, delivery.partition, delivery.offset, invalid)
        value = encode_rejection(
            invalid,
            topic=topic,
            partition=delivery.partition,
            offset=delivery.offset,
            original=delivery.value,
            at=datetime.now(UTC),
        )
        with translated():
            await self._producer.send_and_wait(f"{topic}.rejected", value, key=delivery.key)
        if settle:
            delivery.settle()

    async def run(self, stopping: asyncio.Event, ready: Callable[[], None]) -> None:
        """Runs until `stopping` is set and what is in hand is settled.

        Raises:
            Exception: whatever a handler could not deal with.
            SessionLost: Faust gave up.
            KafkaUnavailable: no broker answered.
        """
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        async with running(make_producer(self._settings)) as self._producer:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                app = self._make_app(folder, loop)
                threading.Thread(target=self._watch, name=f"{self._name} watchdog", daemon=True).start()
                beating = asyncio.create_task(self._beat(app))
                try:
                    await app.start()
                    ready()
                    waiting = asyncio.create_task(stopping.wait())
                    either: set[asyncio.Future[Any]] = {waiting, self._failure}
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
                    if not self._failure.done():
                        await self._drain(app)
                finally:
                    self._closed = True
                    beating.cancel()
                    await app.stop()
                    self._stopped.set()
                    if self._failure.done():
                        self._failure.result()

    async def _drain(self, app: faust.App) -> None:
        self._closed = True
        deadline_s = time.monotonic() + DRAIN_S
        assert self._failure is not None
        while self._in_flight and time.monotonic() < deadline_s and not self._failure.done():
            await asyncio.sleep(0.01)  # noqa: ASYNC110 (three conditions, once in a process's life)
        if self._in_flight:
            log.warning(
                "%s: %d records in hand were not settled; they are delivered again",
                self._name,
                self._in_flight,
            )
        await app.consumer.commit()

    def _make_app(self, folder: str, loop: asyncio.AbstractEventLoop) -> faust.App:
        settings = self._settings
        app = faust.App(
            service_group(settings.prefix, self._name),
            broker=[f"aiokafka://{server.strip()}" for server in settings.kafka.split(",")],
            loop=loop,
            autodiscover=False,
            web_enabled=False,
            datadir=folder,
            store="memory://",
            topic_allow_declare=False,
            topic_disable_leader=True,
            stream_wait_empty=False,
            # Small, because a rebalance throws away what is buffered and reads it again.
            stream_buffer_maxsize=1024,
            broker_commit_interval=COMMIT_EVERY_S,
            broker_session_timeout=settings.session_timeout_s,
            broker_heartbeat_interval=settings.session_timeout_s / 3,
            broker_max_poll_interval=max(300.0, settings.stall_timeout_s * 2),
            consumer_auto_offset_reset="earliest",
            # A topic made a moment ago is found within two seconds instead of five minutes.
            consumer_metadata_max_age_ms=2000,
            producer_metadata_max_age_ms=60_000,
        )
        for topic, handler in self._handlers.items():
            source = app.topic(
                settings.prefix + topic.name,
                key_type=bytes,
                value_type=bytes,
                key_serializer="raw",
                value_serializer="raw",
                partitions=topic.partitions,
            )
            app.agent(source, name=f"{self._name}.{topic.name}")(self._agent(topic, handler))
        app.on_partitions_assigned.connect(self._assign)  # type: ignore[arg-type]  # a bound method serves
        return app

    def _agent(self, topic: Topic, handler: Handler) -> Callable[[Any], Awaitable[None]]:
        async def consume(stream: Any) -> None:
            events: AsyncIterator[Any] = stream.noack().events()
            async for event in events:
                await self._deliver(topic, handler, event)

        return consume

    async def _deliver(self, topic: Topic, handler: Handler, event: Any) -> None:
        while not self._closed and self._in_flight >= self._settings.max_in_flight:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            # Taken from Faust's buffer, but not in hand: unacknowledged, so it is delivered again.
            await asyncio.Event().wait()
        partition = (topic.name, event.message.partition)
        hand = self._hands.get(partition)
        if hand is None:
            return  # given away between buffer and here
        delivery = Delivery(topic.name, event, hand)
        if not hand.take(delivery):
            return
        if self._in_flight == 0:
            self._progress_s = time.monotonic()
        self._in_flight += 1
        try:
            await self._handle(handler, delivery)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 (nothing may leave an agent: it ends the processor instead)
            self.fail(error)
            await asyncio.Event().wait()

    async def _handle(self, handler: Handler, delivery: Delivery) -> None:
        tries = 0
        while True:
            try:
                try:
                    return await handler(delivery)
                except Invalid as invalid:
                    return await self.reject(delivery, invalid)
            except Unavailable as error:
                tries += 1
                log.warning("%s/%d@%d waits: %s", delivery.topic, delivery.partition, delivery.offset, error)
                await asyncio.sleep(WHILE_AWAY.delay_s(tries, random.random()))  # noqa: S311 (jitter)

    async def _assign(self, _app: Any, assigned: Any, *_args: Any, **_kwargs: Any) -> None:
        """Faust has a new assignment; every partition in it is read anew from its committed offset."""
        bare = len(self._settings.prefix)
        now = frozenset((tp.topic[bare:], tp.partition) for tp in assigned)
        before, self._assigned = self._assigned, now
        for hand in self._hands.values():
            hand.over = True
        self._hands = {partition: _Hand(self) for partition in now}
        self._in_flight = 0
        self._progress_s = time.monotonic()
        self._room.set()
        log.info("%s: has partitions %s", self._name, sorted(now))
        try:
            if self._on_revoked and before - now:
                await self._on_revoked(before - now)
            if self._on_assigned and now - before:
                await self._on_assigned(now - before)
        except Exception as error:  # noqa: BLE001 (Faust would log it and go on without the leases)
            self.fail(error)

    async def _beat(self, app: faust.App) -> None:
        """Shows the watchdog that the loop turns, and notices when Faust has crashed."""
        while True:
            self._beat_s = time.monotonic()
            if app.crashed:
                reason = app.crash_reason
                lost = SessionLost(f"Faust: {reason!r}") if reason else KafkaUnavailable("Faust has stopped")
                self.fail(lost)
            await asyncio.sleep(0.2)

    def _watch(self) -> None:
        """The watchdog, in a thread of its own: a stuck loop cannot stop it."""
        stall_s = self._settings.stall_timeout_s
        while not self._stopped.wait(min(1.0, stall_s / 4)):
            now_s = time.monotonic()
            reason = ""
            if now_s - self._beat_s > stall_s:
                reason = "its event loop has not turned"
            elif self._in_flight and now_s - self._progress_s > stall_s:
                reason = f"{self._in_flight} records are in hand and none was settled"
            if reason:
                log.error("%s: %s for %.0f s: ending the process", self._name, reason, stall_s)
                os._exit(EXIT_STALLED)
