"""The Faust application under a processor: its settings, with their reasons, and its calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import faust
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from faust.auth import OAuthCredentials, SASLCredentials, SSLCredentials
from faust.types import TP
from faust.types.auth import CredentialsT

from penstock.core.offset_tracker import Partition
from penstock.core.position import Position
from penstock.errors import KafkaUnavailable, SessionLost
from penstock.kafka.client import positions
from penstock.kafka.client.connection import translated
from penstock.kafka.client.fetch_guard import FetchGuard
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.client.security import arguments
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
        linger_s: how long the broker may wait for more records before it returns the first.
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
        linger_s: float = 0.0,
    ) -> None:
        self._prefix = settings.prefix
        session_s = settings.session_timeout_s
        # `Any`: Faust's own types lack half of the attributes that are used here.
        self._app: Any = faust.App(
            service_group(settings.prefix, name),
            broker=[f"aiokafka://{server.strip()}" for server in settings.kafka.split(",")],
            broker_credentials=_credentials(settings),
            broker_client_id=f"{name}-{uuid.uuid4().hex[:8]}",
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
            broker_session_timeout=session_s,
            # The other members learn within a second that one of them was removed.
            broker_heartbeat_interval=min(session_s / 3, 1.0),
            # How long a rebalance waits for a member whose loop is stalled.
            broker_rebalance_timeout=2 * session_s,
            # Must not be below the session timeout.
            broker_request_timeout=max(40.0, session_s),
            # Too many records in flight pause reading; the stall detector must end the process
            # before the group drops it.
            broker_max_poll_interval=max(300.0, stall_timeout_s * 2),
            # It has nothing to commit. Its own detectors only log, and report idle partitions too.
            broker_commit_interval=NEVER_S,
            broker_commit_livelock_soft_timeout=NEVER_S,
            stream_processing_timeout=NEVER_S,
            consumer_auto_offset_reset="earliest",
            # New partitions are found within two seconds instead of five minutes.
            consumer_metadata_max_age_ms=2000,
        )
        transport: Any = self._app.transport
        transport.Consumer = consumer_type(linger_s)
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
        self._app.on_partitions_revoked.connect(_without_arguments(self._forget_starts))
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
            SessionLost: it has crashed, or reads another log than it read before.
        """
        if self._app.crashed:
            raise SessionLost(f"Faust has crashed: {self._app.crash_reason!r}")
        if (guard := self._guard) is not None:
            # The next process checks its positions at its start.
            guard.ensure()

    async def watch(self) -> None:
        """Checks repeatedly until cancelled.

        Raises:
            SessionLost: see `check`.
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
        """Leaves the group."""
        await self._app.stop()

    async def seek_starts(self, offsets: OffsetReader) -> dict[Partition, int]:
        """Seeks each partition to its commit if that is valid; returns the offsets.

        Commits the start of a partition whose commit is not valid. Until then the old commit would
        look as if all records were read, and a later one would look like a step back.

        Raises:
            KafkaUnavailable: no broker answered, or the assignment has just been replaced.
        """
        committed = await self.rewind()
        identities = await self._identities()
        starts = await offsets.check(
            {
                TopicPartition(self._prefix + topic, number): None
                if offset is None
                else Position.from_stored(offset, identities.get(TP(self._prefix + topic, number)))
                for (topic, number), offset in committed.items()
            }
        )
        positions.report(starts)
        if (guard := self._guard) is not None:
            guard.start({tp: start.position for tp, start in starts.items()})
        bare = len(self._prefix)
        found = {(tp.topic[bare:], tp.partition): start.position.offset for tp, start in starts.items()}
        await self.seek(found)
        # Faust seeks to the commits once more before records flow; see `faust_consumer`.
        self._app.consumer.starts = {
            TP(tp.topic, tp.partition): start.position.offset for tp, start in starts.items()
        }
        if moved := {tp: start.position.offset for tp, start in starts.items() if start.moved}:
            await self.commit({(tp.topic[bare:], tp.partition): offset for tp, offset in moved.items()})
        return found

    @property
    def _guard(self) -> FetchGuard | None:
        """The guard of the consumer; None before it runs."""
        guard: FetchGuard | None = getattr(getattr(self._app.consumer, "_thread", None), "guard", None)
        return guard

    async def _forget_starts(self) -> None:
        self._app.consumer.starts = {}
        if (guard := self._guard) is not None:
            guard.forget()

    async def _identities(self) -> dict[TP, str]:
        """The identities that are committed with the offsets of the assigned partitions."""
        consumer = self._app.consumer
        if not (assigned := consumer.assignment()):
            return {}
        try:
            found: dict[TP, str] = await consumer.committed_identities(assigned)
        except KafkaError as error:
            raise KafkaUnavailable(f"Kafka: {error!r}") from error
        return found

    async def rewind(self) -> dict[Partition, int | None]:
        """Seeks to the committed offsets; returns them by partition, None where there is none.

        Raises:
            KafkaUnavailable: no broker answered, or the assignment has just been replaced.
        """
        consumer = self._app.consumer
        if not consumer.assignment():
            return {}
        try:
            committed = await consumer.seek_to_committed()
        except (KafkaError, AssertionError) as error:  # the client asserts that something is assigned
            raise KafkaUnavailable(f"Kafka: {error!r}") from error
        bare = len(self._prefix)
        return {(tp.topic[bare:], tp.partition): offset for tp, offset in committed.items()}

    async def seek(self, starts: Mapping[Partition, int]) -> None:
        """Continues from these offsets, and discards records that were fetched before.

        `rewind` does not suffice: the client seeks only partitions with a committed offset above 0,
        and Faust keeps the position up to which it has read.

        Raises:
            KafkaUnavailable: no broker answered, or the assignment has just been replaced.
        """
        wanted = {TP(self._prefix + topic, number): offset for (topic, number), offset in starts.items()}
        try:
            if wanted:
                await self._app.consumer.seek_wait(wanted)
        except (KafkaError, TimeoutError) as error:
            raise KafkaUnavailable(f"Kafka: {error!r}") from error

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        """Commits offsets of assigned partitions; False while the group rebalances."""
        wanted = {TP(self._prefix + topic, number): offset for (topic, number), offset in offsets.items()}
        # The driver's method: the layers of Faust above it lose records. Its errors crash the
        # application, which `check` finds.
        return bool(await self._app.consumer._commit(wanted))  # noqa: SLF001 (see above)


def _credentials(settings: Kafka) -> CredentialsT | None:
    """The arguments of every other client as Faust's classes; None is PLAINTEXT."""
    options = arguments(settings)
    context = options.get("ssl_context")
    if provider := options.get("sasl_oauth_token_provider"):
        return OAuthCredentials(oauth_cb=provider, ssl_context=context)
    if mechanism := options.get("sasl_mechanism"):
        return SASLCredentials(
            username=options["sasl_plain_username"],
            password=options["sasl_plain_password"],
            mechanism=mechanism,
            ssl_context=context,
        )
    return SSLCredentials(context) if context is not None else None


def _without_arguments(work: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def handler(*_args: object, **_kwargs: object) -> None:
        await work()

    return handler
