"""The Faust application under a processor: its settings, each with its reason, and the few calls made into it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import faust
from aiokafka.errors import KafkaError
from faust.auth import OAuthCredentials, SASLCredentials, SSLCredentials
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer
from faust.types import TP
from faust.types.auth import CredentialsT

from penstock.core.acknowledgement import Partition
from penstock.errors import KafkaUnavailable, SessionLost
from penstock.kafka.connection import translated
from penstock.kafka.fetching import Fetching
from penstock.kafka.security import arguments
from penstock.kafka.topics import service_group
from penstock.settings import Kafka

NEVER_S = 1e9
# Services of Faust's kind narrate under the module they are defined in, unless told otherwise: ours are to be as quiet as
# its own (`logs.quiet_libraries`).
_LOGGER = logging.getLogger("faust.of_penstock")

Agent = Callable[[Any], Awaitable[None]]


class FaustApp:
    """Faust, embedded in the running loop, acknowledging and committing nothing of its own accord.

    Args:
        settings: where.
        name: of the service; its group's name, too.
        folder: for what Faust insists on writing.
        agents: by bare topic name; each is given a stream whose `events()` have a `message`.
        stall_timeout_s: how long an agent may leave what it has been given.
        before_rebalance: awaited while the group waits: be quick.
        after_rebalance: awaited before the first record of a generation.
        linger_s: how long the broker may wait for more records before it hands over the first.
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
        # `Any`: half of what is used is missing from Faust's own types.
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
            # What is in hand at a rebalance is delivered again, not waited for.
            stream_wait_empty=False,
            # Small, because a rebalance throws away what is buffered and reads it again; large enough for what
            # arrives while a batch is committed.
            stream_buffer_maxsize=1024,
            # A fast path of its extension modules that has to be asked for since it was repaired.
            cython_optimizations=True,
            broker_session_timeout=session_s,
            broker_heartbeat_interval=session_s / 3,
            # How long a rebalance waits for a member whose loop is stuck.
            broker_rebalance_timeout=2 * session_s,
            # Must not be below the session timeout.
            broker_request_timeout=max(40.0, session_s),
            # A full hand pauses reading; that must not cost the membership before the watchdog has its say.
            broker_max_poll_interval=max(300.0, stall_timeout_s * 2),
            # It has nothing to commit; its own detectors only log, and of idle partitions too.
            broker_commit_interval=NEVER_S,
            broker_commit_livelock_soft_timeout=NEVER_S,
            stream_processing_timeout=NEVER_S,
            consumer_auto_offset_reset="earliest",
            # Partitions added a moment ago are found within two seconds instead of five minutes.
            consumer_metadata_max_age_ms=2000,
        )
        transport: Any = self._app.transport
        transport.Consumer = _consumer_type(linger_s)
        for topic, agent in agents.items():
            source = self._app.topic(
                settings.prefix + topic,
                key_type=bytes,
                value_type=bytes,
                key_serializer="raw",
                value_serializer="raw",
                # Faust's own bookkeeping is off for this topic: it commits past what it skips.
                acks=False,
            )
            self._app.agent(source, name=f"{name}.{topic}")(agent)
        self._app.on_partitions_revoked.connect(_ignoring_arguments(before_rebalance))
        self._app.on_rebalance_complete.connect(_ignoring_arguments(after_rebalance))

    @property
    def generation(self) -> int:
        """Of the consumer group, as the consumer's thread knows it."""
        return int(self._app.consumer_generation_id)

    @property
    def rebalancing(self) -> bool:
        """From the moment partitions are taken away until records flow again."""
        return bool(self._app.rebalancing)

    def check(self) -> None:
        """Looks whether Faust is still alive: a crash of its parts does not end it.

        Raises:
            SessionLost: it is not.
        """
        if self._app.crashed:
            raise SessionLost(f"Faust has crashed: {self._app.crash_reason!r}")

    async def start(self) -> None:
        """Joins the group.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        with translated():
            await self._app.start()
        # Its figures are read by nobody and cost throughput.
        self._app.sensors.remove(self._app.monitor)

    async def stop(self) -> None:
        """Leaves the group."""
        await self._app.stop()

    async def rewind(self) -> dict[Partition, int | None]:
        """Goes back to what is committed; that offset, by partition, None where there is none.

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
        """Goes on from these offsets, whatever was fetched or thrown away before.

        `rewind` does not do that for all: the client seeks a partition only when an offset above 0 is committed of it, and
        Faust keeps to what it has read.

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
        """Commits offsets, as far as their partitions are still assigned; False while the group rebalances."""
        wanted = {TP(self._prefix + topic, number): offset for (topic, number), offset in offsets.items()}
        # The driver's own: everything above it in Faust is the bookkeeping that loses records. Its errors crash
        # the application, which `check` notices.
        return bool(await self._app.consumer._commit(wanted))  # noqa: SLF001 (see above)


def _credentials(settings: Kafka) -> CredentialsT | None:
    """The arguments of every other client, in Faust's own words; None is PLAINTEXT."""
    given = arguments(settings)
    context = given.get("ssl_context")
    if provider := given.get("sasl_oauth_token_provider"):
        return OAuthCredentials(oauth_cb=provider, ssl_context=context)
    if mechanism := given.get("sasl_mechanism"):
        return SASLCredentials(
            username=given["sasl_plain_username"],
            password=given["sasl_plain_password"],
            mechanism=mechanism,
            ssl_context=context,
        )
    return SSLCredentials(context) if context is not None else None


def _consumer_type(linger_s: float) -> type[Consumer]:
    """Faust's consumer with what its settings do not reach: its thread's loop, and how long a fetch waits."""

    class Thread(AIOKafkaConsumerThread):
        logger = _LOGGER

        async def on_start(self) -> None:
            await super().on_start()
            assert self._consumer is not None
            Fetching(self._consumer._fetcher, time.monotonic, linger_s)  # noqa: SLF001 (see above)

    class ConsumerOfOurs(Consumer):
        logger = _LOGGER

        def _new_consumer_thread(self) -> Thread:
            # A loop of the kind that runs us (uvloop's) instead of asyncio's own, which is slower.
            loop = type(asyncio.get_running_loop())()
            thread = Thread(self, loop=self.loop, thread_loop=loop, beacon=self.beacon)
            thread._close_thread_loop_on_stop = True  # noqa: SLF001 (as it does with a loop it has made itself)
            return thread

    return ConsumerOfOurs


def _ignoring_arguments(work: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def handler(*_args: object, **_kwargs: object) -> None:
        await work()

    return handler
