"""A cluster of three Kafka brokers on loopback, for tests and benchmarks of broker failures.

    async with three_brokers(supervisor, folder) as cluster:
        ...  # cluster.servers, cluster.brokers[2].kill()

Topics have three replicas by default and a record is acknowledged when two have it, so any one
broker may fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.local.broker import EmbeddedKafka, Node, make_cluster_id
from penstock.local.ports import choose_port
from penstock.local.supervisor import Supervisor

# Small: three brokers share one machine.
HEAP_MB = 256
# A shutdown has little time, because the last brokers would wait for a quorum that no longer
# exists. A kill loses no data.
GRACE_S = 2.0
NUMBERS = (1, 2, 3)


class Cluster:
    """A running cluster.

    Args:
        brokers: started brokers, by node id.
    """

    def __init__(self, brokers: Mapping[int, EmbeddedKafka]) -> None:
        self.brokers = dict(brokers)

    @property
    def servers(self) -> str:
        """Bootstrap servers: every broker, since any one may be down."""
        return ",".join(broker.servers for broker in self.brokers.values())


def name_of(number: int) -> str:
    """The program name of a broker in the supervisor."""
    return f"kafka-{number}"


@asynccontextmanager
async def three_brokers(
    supervisor: Supervisor,
    directory: Path,
    *,
    properties: Mapping[str, str] | None = None,
    heap_mb: int = HEAP_MB,
    order: int = 9,
) -> AsyncIterator[Cluster]:
    """Runs a new cluster of three during a `with` block.

    Args:
        supervisor: runs the brokers and restarts those that die.
        directory: parent of one folder per broker, for configuration and data.
        properties: additional properties of every broker.
        heap_mb: Java heap of each broker in MiB.
        order: see `Program.order`.

    Raises:
        CannotStart: a package is missing, or a broker does not start.
    """
    cluster_id = make_cluster_id()
    controllers = {number: choose_port() for number in NUMBERS}
    brokers = {
        number: EmbeddedKafka(
            supervisor,
            directory / name_of(number),
            order=order,
            node=Node(
                name=name_of(number),
                number=number,
                cluster=cluster_id,
                controllers=controllers,
                heap_mb=heap_mb,
                grace_s=GRACE_S,
                properties=properties or {},
            ),
        )
        for number in NUMBERS
    }
    cluster = Cluster(brokers)
    try:
        # Concurrently: a broker serves only after two of them have elected a controller.
        await asyncio.gather(*(broker.start() for broker in brokers.values()))
        yield cluster
    finally:
        await asyncio.gather(*(broker.stop() for broker in brokers.values()))
