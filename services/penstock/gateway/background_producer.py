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
from penstock.contracts.report_tokens import headers_of_tokens
from penstock.contracts.result import StageResult
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.core.report_tokens import ReportTokens
from penstock.errors import Fatal, KafkaUnavailable, RecordsRefused
from penstock.kafka.client.connection import make_producer, start, stop
from penstock.kafka.client.health import probe
from penstock.kafka.client.sending import Record
from penstock.kafka.processing.outbox import MAX_UNREVOKED, Publisher, send_all
from penstock.kafka.processing.results import write_results
from penstock.kafka.processing.worker_status import require_topic
from penstock.kafka.topology.binding import ensure_bound
from penstock.kafka.topology.topics import HEARTBEATS, STAGE_RESULTS, WORKERS, Topic
from penstock.postgres import outbox
from penstock.postgres.deployment import deployment_id
from penstock.settings import Kafka

STOP_S = 5.0


class BackgroundProducer:
    """A producer that connects in the background, and sends once it is connected.

    Args:
        settings: address of Kafka.
        pool: the database, in which published outbox entries are deleted.
        tokens: of the attempts that workers over HTTP report.
    """

    def __init__(self, settings: Kafka, pool: asyncpg.Pool[asyncpg.Record], tokens: ReportTokens) -> None:
        self._settings = settings
        self._pool = pool
        self._tokens = tokens
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

    async def send(self, topic: Topic, records: Iterable[Record]) -> None:
        """Writes records, and returns once Kafka has them all.

        Raises:
            KafkaUnavailable: Kafka may lack some; send all of them again. When the producer cannot
                recover, `run` raises as well, and the process is replaced.
        """
        try:
            await self._send_all(topic, records)
        except RecordsRefused as error:
            # Records of ours are small: the topic takes none at all, until an operator changes it.
            raise KafkaUnavailable(str(error)) from error

    async def send_heartbeats(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Writes heartbeats, and returns once Kafka has them all.

        Raises:
            KafkaUnavailable: Kafka may lack some; send all of them again.
        """
        await self.send(
            HEARTBEATS,
            [
                (each.worker.encode(), each.encode(), each.headers() + self._token_headers(each.tasks))
                for each in heartbeats
            ],
        )

    async def send_results(self, worker: str, results: Sequence[StageResult]) -> None:
        """Writes results as one record; the attempt of a result that Kafka refuses fails.

        Raises:
            KafkaUnavailable: Kafka may lack some; send all of them again.
        """

        async def write(value: bytes, results: Sequence[StageResult]) -> None:
            headers = self._token_headers(result.fence.attempt_id for result in results)
            await self._send_all(STAGE_RESULTS, [(worker.encode(), value, headers)])

        await write_results(write, worker, results)

    def _token_headers(self, attempt_ids: Iterable[AttemptId]) -> list[tuple[str, bytes]]:
        return headers_of_tokens(map(self._tokens.of, attempt_ids))

    async def _send_all(self, topic: Topic, records: Iterable[Record]) -> None:
        try:
            await send_all(self.ensure_connected(), self._settings.prefix + topic.name, records)
        except Fatal as error:
            raise self._failed(error) from error

    async def try_status(self, worker: str, value: bytes) -> None:
        """Writes a record about this gateway once; a refusal does not end the gateway.

        Raises:
            KafkaUnavailable: it is not on Kafka.
            KafkaRefused: this gateway may not write to the topic, or there is none.
        """
        topic = self._settings.prefix + WORKERS.name
        producer = self.ensure_connected()
        await require_topic(producer, topic)
        await send_all(producer, topic, [(worker.encode(), value, [])])

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
