"""The connection of a worker to Kafka or to a gateway: its transport, its pullers and readers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaProducer

from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.member_data import MemberData
from penstock.worker.attempts import Attempts
from penstock.worker.gateway_client import GatewayClient
from penstock.worker.http_transport import HttpPuller, HttpTransport
from penstock.worker.kafka_transport import KafkaTransport
from penstock.worker.ports import Handlers
from penstock.worker.pull import KafkaPuller
from penstock.worker.readiness import Readiness
from penstock.worker.registered import Registered
from penstock.worker.revocations import listen


class KafkaConnection:
    """The connection of a worker that uses Kafka itself.

    Args:
        producer: started.
        registered: of the worker.
        worker_id: of the worker.
    """

    def __init__(self, producer: AIOKafkaProducer, registered: Registered, worker_id: str) -> None:
        self._registered = registered
        self._worker_id = worker_id
        self.transport = KafkaTransport(producer, registered.settings, worker_id)

    def puller(self, type_name: str, attempts: Attempts, handlers: Handlers) -> KafkaPuller:
        """The puller of a type."""
        registered = self._registered
        return KafkaPuller(
            registered.settings,
            type_name,
            attempts.in_flight,
            attempts.unclaimed,
            self._worker_id,
            handlers.start,
            MemberData.of_worker(registered.stages_by_type[type_name], registered.slots),
        )

    def readers(self, attempts: Attempts) -> list[Coroutine[Any, Any, None]]:
        """The readers that run beside the pullers."""
        return [listen(self._registered.settings, attempts.on_revoked)]


class GatewayConnection:
    """The connection of a worker that uses a gateway.

    Args:
        gateway: connected.
        registered: of the worker.
        worker_id: of the worker.
    """

    def __init__(self, gateway: GatewayClient, registered: Registered, worker_id: str) -> None:
        self._gateway = gateway
        self._limits = registered.limits
        self._worker_id = worker_id
        self.transport = HttpTransport(gateway, worker_id)

    def puller(self, type_name: str, attempts: Attempts, handlers: Handlers) -> HttpPuller:
        """The puller of a type."""
        return HttpPuller(
            self._gateway,
            type_name,
            attempts.in_flight,
            attempts.heartbeats,
            self._worker_id,
            handlers.start,
            self._limits[type_name],
        )

    def readers(self, _attempts: Attempts) -> list[Coroutine[Any, Any, None]]:
        """Nothing: the answers to heartbeats tell which attempts are gone."""
        return []


@asynccontextmanager
async def connected(
    registered: Registered,
    worker_id: str,
    readiness: Readiness,
    on_accepted: Callable[[], object],
    on_refused: Callable[[], object],
) -> AsyncIterator[KafkaConnection | GatewayConnection]:
    """A connection for the time of a `with` block.

    Args:
        registered: of the worker.
        worker_id: of the worker.
        readiness: gets the producer.
        on_accepted: called when tasks can be pulled; over HTTP also again after `on_refused`.
        on_refused: called when the gateway refuses this worker's credentials.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    settings = registered.settings
    if settings.worker_gateway:
        async with GatewayClient.of(settings, on_accepted=on_accepted, on_refused=on_refused) as gateway:
            yield GatewayConnection(gateway, registered, worker_id)
        return
    async with running(make_producer(settings)) as producer:
        readiness.producer = producer
        on_accepted()
        yield KafkaConnection(producer, registered, worker_id)
