"""The Faust application under a processor: its settings, with their reasons, and its calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import faust
from aiokafka.errors import KafkaError
from faust.types import TP

from penstock.core.offset_tracker import Partition
from penstock.errors import KafkaUnavailable, SessionLost
from penstock.kafka.client import positions
from penstock.kafka.client.connection import stop, translated
from penstock.kafka.client.consumer import Consumer
from penstock.kafka.client.fetch_wait import no_gap
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.processing.faust_consumer import consumer_type
from penstock.kafka.topology.topics import service_group
from penstock.settings import Kafka

NEVER_S = 1e9
CHECK_EVERY_S = 0.5

Agent = Callable[[Any], Awaitable[None]]


class FaustApp:
    """Faust, embedded in the running loop; it acknowledges and commits nothing by itself.

    Args:
        settings: where.
        name: of the service; its group's name, too.
        folder: for files that Faust writes.
        agents: by bare topic name; each gets a stream whose `events()` have a `message`.
        stall_timeout_s: seconds without progress that are a stall.
        before_rebalance: awaited while the group waits, so it must be quick.
        after_rebalance: awaited before the first record of a generation.
        gap_s: see `FetchWait`.
    """

    def __init__(
        self,
        settings: Kafka,
        name: str,
        folder: str,
        agents: Mapping[str, Agent],
        *,
        stall_timeout_s: float,
        before_rebalance: Callable[[], Awaitable[None]],
        after_rebalance: Callable[[], Awaitable[None]],
        gap_s: Callable[[], float] = no_gap,
    ) -> None:
        self._prefix = settings.prefix
        self._consumer: Consumer | None = None
        self._make = partial(
            Consumer,
            settings,
            service_group(settings.prefix, name),
            name=f"{name}-{uuid.uuid4().hex[:8]}",
            # The other members learn within a second that one of them was removed; a single member
            # learns of another somewhat later.
            notice_s=1.0,
            gap_s=gap_s,
            # How long a rebalance waits for a member whose loop is stalled.
            rebalance_timeout_ms=int(2000 * settings.session_timeout_s),
            # A request to join waits for the rebalance.
            request_timeout_ms=int(1000 * max(40.0, settings.session_timeout_s)),
            # Too many records in flight pause reading; the stall detector must end the process
            # before the group drops it.
            max_poll_interval_ms=int(1000 * max(300.0, stall_timeout_s * 2)),
            isolation_level="read_uncommitted",
        )
        # `Any`: Faust's own types lack half of the attributes that are used here.
        self._app: Any = faust.App(
            service_group(settings.prefix, name),
            # `_make_consumer` knows the servers.
            broker="aiokafka://",
            loop=asyncio.get_running_loop(),
            autodiscover=False,
            web_enabled=False,
            datadir=folder,
            store="memory://",
            topic_allow_declare=False,
            topic_disable_leader=True,
            # A rebalance does not wait for records in flight; they are delivered again.
            stream_wait_empty=False,
            # Small, because a rebalance discards the buffer and reads it again; large enough for
            # the records that arrive while a batch is committed.
            stream_buffer_maxsize=1024,
            # A fast path of its extension modules that is off by default.
            cython_optimizations=True,
            # It has nothing to commit. Its own detectors only log, and report idle partitions too.
            broker_commit_interval=NEVER_S,
            broker_commit_livelock_soft_timeout=NEVER_S,
            stream_processing_timeout=NEVER_S,
        )
        transport: Any = self._app.transport
        transport.Consumer = consumer_type(self._make_consumer)
        # It writes nothing.
        self._app.boot_strategy.enable_kafka_producer = False
        for topic, agent in agents.items():
            source = self._app.topic(
                settings.prefix + topic,
                key_type=bytes,
                value_type=bytes,
                key_serializer="raw",
                value_serializer="raw",
                # Without Faust's own acknowledgements: it would commit past records that it skips.
                acks=False,
            )
            self._app.agent(source, name=f"{name}.{topic}")(agent)
        self._app.on_partitions_revoked.connect(_without_arguments(before_rebalance))
        self._app.on_partitions_revoked.connect(_without_arguments(self._clear_starts))
        self._app.on_rebalance_complete.connect(_without_arguments(after_rebalance))

    @property
    def generation(self) -> int:
        """The generation of the consumer group, as the consumer knows it."""
        return int(self._app.consumer_generation_id)

    @property
    def rebalancing(self) -> bool:
        """Whether partitions are revoked and records don't flow again yet."""
        return bool(self._app.rebalancing)

    def check(self) -> None:
        """Checks that Faust is alive: a crash of its parts does not end it.

        Raises:
            SessionLost: it has crashed.
            KafkaUnavailable: it reads another log than it read before.
        """
        if self._app.crashed:
            raise SessionLost(f"Faust has crashed: {self._app.crash_reason!r}")
        if self._consumer is not None:
            self._consumer.guard.ensure()

    async def watch(self) -> None:
        """Checks repeatedly until cancelled.

        Raises:
            SessionLost, KafkaUnavailable: see `check`.
        """
        while True:
            self.check()
            await asyncio.sleep(CHECK_EVERY_S)

    async def start(self) -> None:
        """Joins the group.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        with translated():
            await self._app.start()
        # Its metrics are not used and cost throughput.
        self._app.sensors.remove(self._app.monitor)

    async def stop(self) -> None:
        """Leaves the group.

        Raises:
            Fatal: a part of the consumer does not end; see `Consumer.stop`.
        """
        try:
            await self._app.stop()
        finally:
            # Faust logs errors of its parts, and does not stop a part behind one that failed.
            if self._consumer is not None:
                await stop(self._consumer)

    async def seek_starts(self, offsets: OffsetReader) -> dict[Partition, int]:
        """Seeks each partition to its commit if that is valid; returns the offsets.

        Commits the start of a partition whose commit is not valid. Until then the old commit would
        look as if all records were read, and a later one would look like a step back.

        Raises:
            KafkaUnavailable: no broker answered, or the assignment has just been replaced.
        """
        if (consumer := self._consumer) is None or not (assigned := consumer.assignment()):
            return {}
        by_faust = self._app.consumer
        try:
            starts = await offsets.check(await consumer.committed_positions(assigned))
            positions.report(starts)
            consumer.guard.start({tp: start.position for tp, start in starts.items()})
            found = {TP(*tp): start.position.offset for tp, start in starts.items()}
            # By Faust, which keeps the position up to which it has read.
            await by_faust.seek_wait(found)
        except (KafkaError, TimeoutError) as error:
            raise KafkaUnavailable(f"Kafka: {error!r}") from error
        # Faust seeks to the commits once more before records flow; see `faust_consumer`.
        by_faust.starts = found
        # By names without the prefix.
        bare = {tp: (tp.topic.removeprefix(self._prefix), tp.partition) for tp in found}
        if moved := {bare[tp]: offset for tp, offset in found.items() if starts[tp].moved}:
            await self.commit(moved)
        return {bare[tp]: offset for tp, offset in found.items()}

    def _make_consumer(self) -> Consumer:
        self._consumer = self._make()
        return self._consumer

    async def _clear_starts(self) -> None:
        self._app.consumer.starts = {}
        if self._consumer is not None:
            self._consumer.guard.forget()

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        """Commits offsets of assigned partitions; False while the group rebalances."""
        wanted = {TP(self._prefix + topic, number): offset for (topic, number), offset in offsets.items()}
        # The driver's method: the layers of Faust above it lose records. Its errors crash the
        # application, which `check` finds.
        return bool(await self._app.consumer._commit(wanted))  # noqa: SLF001 (see above)


def _without_arguments(work: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def handler(*_args: object, **_kwargs: object) -> None:
        await work()

    return handler
