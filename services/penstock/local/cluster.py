"""Three Kafka brokers on loopback, each a process and all of them controllers: for tests and benchmarks of what one may lose.

    async with three_brokers(supervisor, folder) as cluster:
        ...  # cluster.servers, cluster.kill(2)

Topics have three copies by default and a record is acknowledged when two have it, so any one broker may fail.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.local.broker import EmbeddedKafka, Node, make_identity
from penstock.local.ports import choose_port
from penstock.local.supervisor import Supervisor

# Three on one machine, none of which does much.
HEAP_MB = 256
# The last ones would wait for a quorum that is gone; kill -9 costs them nothing either.
GRACE_S = 2.0
NUMBERS = (1, 2, 3)


class Cluster:
    """Brokers that belong together.

    Args:
        brokers: by id, started.
    """

    def __init__(self, brokers: Mapping[int, EmbeddedKafka]) -> None:
        self.brokers = dict(brokers)

    @property
    def servers(self) -> str:
        """Bootstrap servers: all of them, since any may be away."""
        return ",".join(broker.servers for broker in self.brokers.values())

    def kill(self, number: int, by: int = signal.SIGKILL) -> None:
        """Sends a signal to one broker; what ends is started again by the supervisor, with its back-off."""
        self.brokers[number].kill(by)

    async def stop(self, number: int) -> None:
        """Shuts one broker down within `GRACE_S`, and leaves it so until `start`."""
        await self.brokers[number].stop()

    async def start(self, number: int) -> None:
        """Starts a broker that was stopped, on its old ports and data."""
        await self.brokers[number].start()


def name_of(number: int) -> str:
    """The supervisor's name of a broker."""
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
    """A new cluster of three for the time of a `with` block.

    Args:
        supervisor: runs them, and starts again whatever dies.
        directory: a folder each, for configuration and data.
        properties: further lines of the configuration of all.
        heap_mb: memory of each one's Java heap, in MiB.
        order: see `Program.order`.

    Raises:
        CannotStart: something is missing, or one of them does not come up.
    """
    identity = make_identity()
    controllers: dict[int, int] = {}
    for number in NUMBERS:
        port = choose_port()
        while port in controllers.values():
            port = choose_port()
        controllers[number] = port
    brokers = {
        number: EmbeddedKafka(
            supervisor,
            directory / name_of(number),
            order=order,
            node=Node(
                name=name_of(number),
                number=number,
                cluster=identity,
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
        # All at once: none serves before two of them have elected a controller.
        await asyncio.gather(*(broker.start() for broker in brokers.values()))
        yield cluster
    finally:
        await asyncio.gather(*(broker.stop() for broker in brokers.values()))
