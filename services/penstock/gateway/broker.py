"""The gateway's way to Kafka: one producer, connected as soon as a broker can be reached.

The gateway serves without it: tasks are taken into PostgreSQL, and what cancelling them owes is left to the sweeper.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.contracts.event import Owed
from penstock.errors import Fatal, KafkaUnavailable
from penstock.kafka.connection import make_producer, start
from penstock.kafka.health import probe
from penstock.kafka.outbox import Publisher, send_all
from penstock.kafka.topics import Topic
from penstock.postgres import outbox
from penstock.settings import Kafka

log = logging.getLogger(__name__)

CONNECT_AGAIN_S = 1.0
STOP_S = 5.0


class Broker:
    """Sends to Kafka once connected.

    Args:
        settings: where Kafka is.
        pool: of the database, for striking out what is published.
    """

    def __init__(self, settings: Kafka, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._settings = settings
        self._pool = pool
        self._producer: AIOKafkaProducer | None = None
        self._publisher: Publisher | None = None
        self._why_not = "not connected yet"

    @property
    def producer(self) -> AIOKafkaProducer:
        """The producer.

        Raises:
            KafkaUnavailable: no broker has been reached yet.
        """
        if self._producer is None:
            raise KafkaUnavailable(f"Kafka at {self._settings.kafka}: {self._why_not}")
        return self._producer

    async def send(self, topic: Topic, records: Iterable[tuple[bytes | None, bytes]]) -> None:
        """Writes (key, value) records, and returns once Kafka has them all.

        Raises:
            KafkaUnavailable: some may not be there; send all of them again. When the producer is broken for good,
                `run` has been told, and it is the next process that takes them.
        """
        try:
            await send_all(self.producer, self._settings.prefix + topic.name, records)
        except Fatal as error:
            if self._publisher is not None:
                self._publisher.fail(error)
            raise KafkaUnavailable(f"{error}: this gateway starts anew") from error

    def owe(self, owed: Owed) -> None:
        """Publishes what a committed transaction owes, in the background; the sweeper does when this cannot."""
        if self._publisher is not None:
            self._publisher.owe(owed)

    async def probe(self) -> None:
        """Asks any broker for the topics there are.

        Raises:
            KafkaUnavailable: none answers.
        """
        await probe(self.producer, self._settings.kafka)

    async def run(self) -> None:
        """Connects, then publishes until cancelled; what is under way is finished if Kafka answers.

        Raises:
            Fatal: the producer is broken for good, whoever has found it.
        """
        producer = await self._connect()
        publisher = Publisher(producer, self._settings, self._strike_out)
        self._producer, self._publisher = producer, publisher
        try:
            await publisher.run()
        finally:
            # A broker that has gone away must not keep us from stopping.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(publisher.drain(), STOP_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(producer.stop(), STOP_S)

    async def _connect(self) -> AIOKafkaProducer:
        while True:
            producer = make_producer(self._settings)
            try:
                await start(producer)
            except KafkaUnavailable as error:
                if self._why_not != str(error):
                    self._why_not = str(error)
                    log.warning("%s: trying again every %g s", error, CONNECT_AGAIN_S)
                await asyncio.sleep(CONNECT_AGAIN_S)
            else:
                return producer

    async def _strike_out(self, ids: Sequence[int]) -> None:
        await outbox.paid(self._pool, ids)
