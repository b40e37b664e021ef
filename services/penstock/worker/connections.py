"""The connection of a worker to Kafka or to a gateway: its transport, its pullers and readers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer

import penstock
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.member_data import MemberData
from penstock.kafka.processing.worker_status import StatusSender
from penstock.worker.attempts import Attempts
from penstock.worker.gateway_client import GatewayClient
from penstock.worker.held_tokens import HeldTokens
from penstock.worker.http_transport import HttpPuller, HttpTransport
from penstock.worker.kafka_transport import KafkaTransport
from penstock.worker.ports import Handlers
from penstock.worker.pull import KafkaPuller
from penstock.worker.readiness import Readiness
from penstock.worker.registered import Registered
from penstock.worker.revocations import listen
from penstock.worker.status import status_sender


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection of a worker.

    Attributes:
        transport: sends results, claims and heartbeats.
        puller: makes the puller of a type.
        readers: the readers that run beside the pullers.
        tokens: of the attempts that the worker holds; a gateway gives out none.
        status: makes what tells that the worker lives; None over HTTP, where the gateway tells it.
    """

    transport: KafkaTransport | HttpTransport
    puller: Callable[[str, Attempts, Handlers], KafkaPuller | HttpPuller]
    readers: Callable[[Attempts], list[Coroutine[Any, Any, None]]]
    tokens: HeldTokens
    status: Callable[[Attempts], StatusSender] | None = None


def _over_kafka(producer: AIOKafkaProducer, registered: Registered, worker_id: str) -> Connection:
    def puller(type_name: str, attempts: Attempts, handlers: Handlers) -> KafkaPuller:
        return KafkaPuller(
            registered.settings,
            type_name,
            attempts.in_flight,
            attempts.unclaimed,
            worker_id,
            handlers.start,
            MemberData.of_worker(registered.stages_by_type[type_name], registered.slots),
        )

    tokens = HeldTokens()
    transport = KafkaTransport(producer, registered.settings, worker_id, tokens)
    return Connection(
        transport,
        puller,
        lambda attempts: [listen(registered.settings, attempts.on_revoked)],
        tokens,
        lambda attempts: status_sender(registered, worker_id, attempts.in_flight, transport),
    )


def _over_gateway(gateway: GatewayClient, registered: Registered, worker_id: str) -> Connection:
    def puller(type_name: str, attempts: Attempts, handlers: Handlers) -> HttpPuller:
        return HttpPuller(
            gateway,
            type_name,
            attempts.in_flight,
            attempts.heartbeats,
            worker_id,
            handlers.start,
            registered.limits[type_name],
            about={
                "host": socket.gethostname(),
                "version": penstock.__version__,
                "stages": sorted(registered.stages_by_type[type_name]),
            },
        )

    # No readers: the answers to heartbeats tell which attempts are gone.
    return Connection(HttpTransport(gateway, worker_id), puller, lambda _attempts: [], HeldTokens())


@asynccontextmanager
async def connected(
    registered: Registered,
    worker_id: str,
    readiness: Readiness,
    on_accepted: Callable[[], object],
    on_refused: Callable[[], object],
) -> AsyncIterator[Connection]:
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
            yield _over_gateway(gateway, registered, worker_id)
        return
    async with running(make_producer(settings)) as producer:
        readiness.producer = producer
        on_accepted()
        yield _over_kafka(producer, registered, worker_id)
