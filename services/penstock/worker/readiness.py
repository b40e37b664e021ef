"""Whether a worker takes tasks, for /readyz."""

from __future__ import annotations

from aiokafka import AIOKafkaProducer

from penstock.errors import CannotStart, GatewayUnavailable, KafkaUnavailable, PenstockError
from penstock.kafka.client import health
from penstock.worker.settings import WorkerSettings


class Readiness:
    """The state of a worker's connection to Kafka, or to a gateway.

    Args:
        settings: of the worker.

    Attributes:
        producer: by which a broker is asked, once it is started.
        stopping: whether the worker stops.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.producer: AIOKafkaProducer | None = None
        self.stopping = False
        self._servers = settings.kafka
        # Why no task can be pulled; None while tasks can.
        self._fault: PenstockError | None = KafkaUnavailable(f"no connection to {settings.kafka} yet")
        if settings.worker_gateway:
            self._fault = GatewayUnavailable(f"no answer of {settings.worker_gateway} yet")

    def accept(self) -> None:
        """Notes that tasks can be pulled."""
        self._fault = None

    def refuse(self) -> None:
        """Notes that the gateway refuses the credentials."""
        self._fault = GatewayUnavailable("the gateway refuses the credentials of this worker")

    async def probe(self) -> None:
        """Returns when the worker takes tasks.

        Raises:
            Unavailable: Kafka or the gateway does not answer, or the gateway refuses this worker.
            CannotStart: the worker is stopping.
        """
        if self.stopping:
            raise CannotStart("the worker is stopping")
        if self._fault is not None:
            raise self._fault
        if self.producer is not None:
            await health.probe(self.producer, self._servers)
