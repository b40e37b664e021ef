"""The gateway's connection to Kafka: one producer, which connects in the background.

The gateway also serves without it: submissions need only PostgreSQL, and the sweeper publishes the
outbox entries of cancellations. The gateway keeps their revocations until it is connected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.concurrency.cancellation import cleanup_timeout
from penstock.concurrency.retry import retry_until_available
from penstock.contracts.event import OutboxEntry
from penstock.contracts.heartbeat import Heartbeat
from penstock.contracts.result import StageResult
from penstock.contracts.revocation import Revocation
from penstock.errors import Fatal, KafkaUnavailable, RecordsRefused
from penstock.kafka.client.connection import make_producer, start, stop, translated
from penstock.kafka.client.health import probe
from penstock.kafka.client.pending_writes import acknowledged, require_writable
from penstock.kafka.processing.outbox import MAX_UNREVOKED, Publisher, send_all
from penstock.kafka.processing.results import write_results
from penstock.kafka.topology.binding import ensure_bound
from penstock.kafka.topology.topics import HEARTBEATS, STAGE_RESULTS, Topic
from penstock.postgres import outbox
from penstock.postgres.deployment import deployment_id
from penstock.settings import Kafka

STOP_S = 5.0


class BackgroundProducer:
    """A producer that connects in the background, and sends once it is connected.

    Args:
        settings: address of Kafka.
        pool: the database, in which published outbox entries are deleted.
    """

    def __init__(self, settings: Kafka, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._settings = settings
        self._pool = pool
        self._producer: AIOKafkaProducer | None = None
        self._publisher: Publisher | None = None
        self._connect_error = "not connected yet"
        # Revocations before the connection, and how many attempts they have.
        self._unrevoked: list[Revocation] = []
        self._unrevoked_attempts = 0

    def ensure_connected(self) -> AIOKafkaProducer:
        """Returns the connected producer.

        Raises:
            KafkaUnavailable: no broker has been reached yet.
        """
        if self._producer is None:
            raise KafkaUnavailable(f"Kafka at {self._settings.kafka}: {self._connect_error}")
        return self._producer

    async def send(self, topic: Topic, records: Iterable[tuple[bytes | None, bytes]]) -> None:
        """Writes (key, value) records, and returns once Kafka has them all.

        Raises:
            KafkaUnavailable: Kafka may lack some; send all of them again. When the producer cannot
                recover, `run` raises as well, and the process is replaced.
        """
        try:
            await self._send_all(topic, records)
        except RecordsRefused as error:
            # Records of ours are small: the topic takes none at all, until an operator changes it.
            raise KafkaUnavailable(str(error)) from error

    async def send_heartbeats(self, worker: str, heartbeats: Sequence[Heartbeat]) -> None:
        """Writes heartbeats, and returns once Kafka has them all.

        Raises:
            KafkaUnavailable: Kafka may lack some; send all of them again.
        """
        record_key = worker.encode()
        silent = [(record_key, heartbeat.encode()) for heartbeat in heartbeats if not heartbeat.progress]
        await self.send(HEARTBEATS, silent)
        for heartbeat in heartbeats:
            if heartbeat.progress:
                await self._send_reports(record_key, heartbeat)

    async def _send_reports(self, record_key: bytes, heartbeat: Heartbeat) -> None:
        """Writes a record with headers, which batches of `send_all` have not."""
        producer, topic = self.ensure_connected(), self._settings.prefix + HEARTBEATS.name
        require_writable(producer, topic)
        try:
            with translated():
                future = await producer.send(
                    topic, heartbeat.encode(), key=record_key, headers=heartbeat.headers()
                )
                await acknowledged(producer, topic, [future])
                await future
        except RecordsRefused as error:
            raise KafkaUnavailable(str(error)) from error
        except Fatal as error:
            raise self._failed(error) from error

    async def send_results(self, worker: str, results: Sequence[StageResult]) -> None:
        """Writes results as one record; the attempt of a result that Kafka refuses fails.

        Raises:
            KafkaUnavailable: Kafka may lack some; send all of them again.
        """

        async def write(value: bytes) -> None:
            await self._send_all(STAGE_RESULTS, [(worker.encode(), value)])

        await write_results(write, worker, results)

    async def _send_all(self, topic: Topic, records: Iterable[tuple[bytes | None, bytes]]) -> None:
        try:
            await send_all(self.ensure_connected(), self._settings.prefix + topic.name, records)
        except Fatal as error:
            raise self._failed(error) from error

    def _failed(self, error: Fatal) -> KafkaUnavailable:
        """Stops the gateway, whose producer cannot recover; returns the answer to the request."""
        if self._publisher is not None:
            self._publisher.fail(error)
        return KafkaUnavailable(f"{error}: this gateway begins again")

    def enqueue(self, entry: OutboxEntry) -> None:
        """Publishes the outbox entry of a committed transaction in the background.

        The sweeper publishes it when the gateway cannot.
        """
        if self._publisher is not None:
            self._publisher.enqueue(entry)
        elif entry.revocation and self._unrevoked_attempts < MAX_UNREVOKED:
            self._unrevoked.append(entry.revocation)
            self._unrevoked_attempts += len(entry.revocation.tasks)

    async def probe(self) -> None:
        """Lists the topics, to see that a broker answers.

        Raises:
            KafkaUnavailable: no broker answers.
        """
        await probe(self.ensure_connected(), self._settings.kafka)

    async def run(self) -> None:
        """Connects, then publishes until cancelled; then completes what is under way.

        Raises:
            Fatal: the producer cannot recover, or the prefix belongs to another database.
        """
        producer = await self._connect()
        try:
            await ensure_bound(self._settings, partial(deployment_id, self._pool))
        except BaseException:
            # Fails closed: raised again, the gateway ends, and no connection stays open.
            await stop(producer)
            raise
        publisher = Publisher(producer, self._settings, self._delete_published)
        self._producer, self._publisher = producer, publisher
        for revocation in self._unrevoked:
            publisher.enqueue(OutboxEntry(revocation=revocation))
        self._unrevoked = []
        try:
            await publisher.run()
        finally:
            # With a timeout, so that the gateway stops without Kafka, too.
            try:
                with contextlib.suppress(TimeoutError):
                    async with cleanup_timeout(STOP_S):
                        await publisher.drain()
            finally:
                await stop(producer)

    async def _connect(self) -> AIOKafkaProducer:
        async def connect() -> AIOKafkaProducer:
            producer = make_producer(self._settings)
            try:
                await start(producer)
            except KafkaUnavailable as error:
                self._connect_error = str(error)
                raise
            return producer

        return await retry_until_available(connect, waiting_for="connection to Kafka")

    async def _delete_published(self, ids: Sequence[int]) -> None:
        await outbox.delete_published(self._pool, ids)
