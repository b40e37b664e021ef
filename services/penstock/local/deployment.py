"""A complete deployment on this machine, for the time of an `async with` block.

    async with Deployment(Options(data_dir=path)) as deployment:
        ...  # deployment.gateway_url, deployment.postgres, deployment.kill("stages")

`penstock up`, the demo, the benchmarks and the tests use it. Inside the block every service has
reported that it serves. At its end the services stop first (those that accept work before those
those that finish it), then the servers. One module, because starting and stopping are one order.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from penstock.core.restart import RestartPolicy
from penstock.discovery import DEFAULT_DATA_DIR, WITHOUT_CREDENTIALS, Addresses
from penstock.errors import CannotStart, SettingsError
from penstock.kafka.topology import services, topic_plan
from penstock.kafka.topology.binding import ensure_bound
from penstock.local.broker import EmbeddedKafka
from penstock.local.concurrently import run_both, run_to_completion
from penstock.local.database import EmbeddedPostgres
from penstock.local.existing import probe
from penstock.local.jars import Progress
from penstock.local.orphans import end_orphans
from penstock.local.output import FileLog, both
from penstock.local.ports import LOOPBACK, MAX_PORT, choose_port
from penstock.local.state import CALLBACK_ALLOW, CALLBACK_SECRET_FILE, DataDir, callback_allow, make_secrets
from penstock.local.supervisor import OnLine, Program, Supervisor
from penstock.process import exit_status
from penstock.settings import Kafka

USUAL_PORTS = {"gateway": 8420, "kafka": 9092, "postgres": 5432}
GATEWAY = "gateway"

# Consecutive exits of a service before it ever served, after which the start gives up.
_MOST_EXITS = 3
# The exit status of a service with a permanent error, such as a wrong setting.
_PERMANENT_FAILURE = exit_status(SettingsError())


@dataclass(frozen=True, kw_only=True)
class Service:
    """How to run a service.

    Attributes:
        argv: the command; settings come from the environment.
        order: services with the lowest order are stopped first.
    """

    argv: tuple[str, ...]
    order: int


METRICS_PORT = "PENSTOCK_METRICS_PORT"
SERVICES: Mapping[str, Service] = {
    name: Service(argv=(sys.executable, "-m", "penstock", "run", name), order=service.stop_order)
    for name, service in services.SERVICES.items()
}
_SERVERS_ORDER = 9


@dataclass(frozen=True, kw_only=True)
class Options:
    """The parts to start, and their options.

    Attributes:
        data_dir: folder for server data, objects and the log.
        fresh: whether to delete the data of an earlier run in `data_dir`.
        kafka: bootstrap servers of an existing cluster; None starts a broker.
        postgres: URL of an existing database; None starts a server.
        prefix: prefix of topic and consumer group names.
        objects: URL of the object store; None is a folder in `data_dir`.
        gateway_port: preferred port; a free one is chosen when it is taken, and kept for later runs
            in the directory. 0 means no preference.
        kafka_port: the same for the embedded broker.
        postgres_port: the same for the embedded database.
        replicas: processes by service; an absent service is not started. None starts one of each.
        services: the table of services; tests replace it.
        environment: additional settings for the services.
        restart: delays before a program is restarted.
        start_timeout_s: seconds that each part may take until it serves.
    """

    data_dir: Path = DEFAULT_DATA_DIR
    fresh: bool = False
    kafka: str | None = None
    postgres: str | None = None
    prefix: str = "penstock."
    objects: str | None = None
    gateway_port: int = USUAL_PORTS["gateway"]
    kafka_port: int = USUAL_PORTS["kafka"]
    postgres_port: int = USUAL_PORTS["postgres"]
    replicas: Mapping[str, int] | None = None
    services: Mapping[str, Service] = field(default_factory=lambda: SERVICES)
    environment: Mapping[str, str] = field(default_factory=dict)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    start_timeout_s: float = 60.0

    def validate(self) -> list[str]:
        """Returns contradictions between fields, one sentence each."""
        problems = Kafka(kafka=self.kafka).validate() if self.kafka else []
        replicas = self.replicas if self.replicas is not None else {}
        unknown = sorted(set(replicas) - set(self.services))
        if unknown:
            problems.append(
                f"replicas names {', '.join(unknown)}, but services has only {', '.join(self.services)}"
            )
        if replicas.get(GATEWAY, 1) > 1:
            problems.append(
                f"replicas={GATEWAY}:{replicas[GATEWAY]}, but gateway_port={self.gateway_port} allows only one"
            )
        if self.fresh and self.kafka and self.postgres:
            problems.append("fresh deletes embedded data, but kafka and postgres are both existing servers")
        return problems


@dataclass(frozen=True)
class Listener:
    """Callbacks that follow a deployment; by default they do nothing.

    Attributes:
        on_step: receives a short description of each step of the start.
        on_fetch: receives (jars fetched, jars in total) after each jar.
        on_line: receives every output line of every program, from any thread.
    """

    on_step: Callable[[str], None] = lambda _text: None
    on_fetch: Progress = lambda _done, _total: None
    on_line: OnLine = lambda _name, _line: None


class Deployment:
    """Starts all parts when the block begins, stops all parts when it ends.

    Raises (when the block begins):
        CannotStart: a package or port is missing, or a part does not start.
        SettingsError: the options contradict each other.
        Unavailable: an existing server does not answer.
    """

    def __init__(self, options: Options, listener: Listener | None = None) -> None:
        problems = options.validate()
        if problems:
            raise SettingsError("; ".join(problems))
        self._options = options
        self._listener = listener or Listener()
        self._supervisor: Supervisor | None = None
        self._data_dir: DataDir | None = None
        self._log: FileLog | None = None
        self._addresses: Addresses | None = None
        self._service_names: list[str] = []
        self._metrics_ports: dict[str, int] = {}
        self._secrets: dict[str, str] = {}
        self._ports: dict[str, int] = {}
        self.embedded_kafka: EmbeddedKafka | None = None
        self.embedded_postgres: EmbeddedPostgres | None = None

    @property
    def addresses(self) -> Addresses:
        """The addresses of all parts."""
        assert self._addresses is not None, "the deployment has not been started"
        return self._addresses

    @property
    def kafka(self) -> str:
        """Bootstrap servers of Kafka."""
        return self.addresses.kafka

    @property
    def postgres(self) -> str:
        """Connection URL of the database."""
        return self.addresses.postgres

    @property
    def gateway_url(self) -> str:
        """Base URL of the gateway."""
        return self.addresses.gateway

    @property
    def metrics_ports(self) -> dict[str, int]:
        """The port of each process for metrics and health, by name; empty while they are off."""
        return dict(self._metrics_ports)

    @property
    def environment(self) -> dict[str, str]:
        """The settings that lead a worker, a client or another service to this deployment."""
        options = self._options
        # With existing servers this may be production: local callback targets need permission.
        allow = callback_allow(development=not (options.kafka and options.postgres))
        defaults = {**self._secrets, CALLBACK_ALLOW: allow}
        return {**defaults, **options.environment, **self.addresses.environment()}

    @property
    def data_dir(self) -> Path:
        """The folder of the data and the log."""
        return self._options.data_dir.absolute()

    @property
    def log_file(self) -> Path:
        """The log file with every output line of every program."""
        return self.data_dir / "log" / "penstock.log"

    @property
    def callback_secret_file(self) -> Path:
        """The file of the secret that signs callbacks; unused when the environment has a secret."""
        return self.data_dir / CALLBACK_SECRET_FILE

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of the running programs by name: services, `kafka`, `postgres`."""
        return self._running.processes()

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> int:
        """Signals one program and returns its process id; a program that ends is restarted.

        Raises:
            NotFound: no program of that name runs now.
        """
        return self._running.kill(name, signal_number)

    def exits(self, name: str) -> int:
        """The number of times that `name` ended without being stopped."""
        return self._running.exits(name)

    def kill_all(self) -> None:
        """Kills every program, without a grace period."""
        if self._supervisor is not None:
            self._supervisor.kill_all()

    async def wait_ready(self, names: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Waits until these services (default: all) serve; after a kill, for the new process.

        Raises:
            CannotStart: a service does not serve in time or cannot start; with its last log lines.
        """
        timeout_s = self._options.start_timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        exits = {
            name: self._running.exits(name) for name in (self._service_names if names is None else names)
        }
        # Checks all services in each round: a permanent error of one must not wait for the others.
        while waiting := [name for name in exits if not self._running.is_ready(name)]:
            ended = {name: self._running.exits(name) - exits[name] for name in waiting}
            for name, times in ended.items():
                if times and self._running.last_status(name) == _PERMANENT_FAILURE:
                    # A restart cannot help: its settings do not change.
                    raise CannotStart(f"{name} cannot start:\n{self._running.tail(name)}")
            late = asyncio.get_running_loop().time() > deadline
            for name, times in ended.items():
                if late or times >= _MOST_EXITS:
                    raise CannotStart(
                        f"{name} does not start; its last log lines:\n{self._running.tail(name)}"
                    )
            await asyncio.sleep(0.02)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def _running(self) -> Supervisor:
        assert self._supervisor is not None, "the deployment has not been started"
        return self._supervisor

    async def _start(self) -> None:
        options, on_step = self._options, self._listener.on_step
        self._data_dir = DataDir(options.data_dir)
        run_dir = self.data_dir / "run"
        for orphan in await asyncio.to_thread(end_orphans, run_dir):
            on_step(f"ended an orphaned process of an earlier run: {orphan}")
        if options.fresh:
            on_step(f"deleting the data in {self.data_dir}")
            for name in ("kafka", "postgres", "objects"):
                await asyncio.to_thread(shutil.rmtree, self.data_dir / name, ignore_errors=True)
        self._log = FileLog(self.log_file)
        self._supervisor = Supervisor(
            both(self._log, self._listener.on_line), run_dir=run_dir, policy=options.restart
        )
        await probe(self._kafka_settings(options.kafka) if options.kafka else None, options.postgres)
        # Concurrently, because each start mostly waits for the disk.
        kafka, postgres = await run_both(self._start_kafka(), self._start_postgres())
        folder = self.data_dir / "objects"
        folder.mkdir(exist_ok=True)
        port = choose_port(preferred := self._preferred_port("gateway", options.gateway_port))
        if preferred not in (0, port):
            on_step(f"port {preferred} is taken: the gateway listens on {port}")
        self._ports["gateway"] = port
        self._data_dir.keep_ports({**self._data_dir.last_ports(), **self._ports})
        self._addresses = Addresses(
            pid=os.getpid(),
            gateway=f"http://{LOOPBACK}:{port}",
            kafka=kafka,
            postgres=postgres,
            prefix=options.prefix,
            objects=options.objects or folder.as_uri(),
            embedded_kafka=not options.kafka,
        )
        self._secrets = make_secrets(self.data_dir)
        on_step("creating topics and tables")
        await run_both(topic_plan.create(self._kafka_settings(kafka)), self._migrate())
        await ensure_bound(self._kafka_settings(kafka), self._read_id)
        on_step("starting services")
        self._start_services(port)
        (run_dir / "services").write_text("\n".join(self._service_names))
        await self.wait_ready()
        self._data_dir.publish(replace(self._addresses, deployment=await self._read_id()))

    def _preferred_port(self, server: str, option: int) -> int:
        """The port of the last run, unless the option names another one than the usual one."""
        assert self._data_dir is not None, "the deployment has not been started"
        return self._data_dir.last_ports().get(server, option) if option == USUAL_PORTS[server] else option

    async def _start_kafka(self) -> str:
        options, on_step = self._options, self._listener.on_step
        if options.kafka:
            return options.kafka
        on_step("starting Kafka")
        preferred = self._preferred_port("kafka", options.kafka_port)
        broker = EmbeddedKafka(self._running, self.data_dir / "kafka", port=preferred, order=_SERVERS_ORDER)
        self.embedded_kafka = broker
        await broker.start(progress=self._listener.on_fetch, timeout_s=options.start_timeout_s)
        if preferred not in (0, broker.port):
            on_step(f"port {preferred} is taken: Kafka listens on {broker.port}")
        self._ports["kafka"] = broker.port
        return broker.servers

    async def _start_postgres(self) -> str:
        options, on_step = self._options, self._listener.on_step
        if options.postgres:
            return options.postgres
        on_step("starting PostgreSQL")
        preferred = self._preferred_port("postgres", options.postgres_port)
        server = EmbeddedPostgres(
            self._running, self.data_dir / "postgres", port=preferred, order=_SERVERS_ORDER
        )
        self.embedded_postgres = server
        await server.start(timeout_s=options.start_timeout_s)
        if preferred not in (0, server.port):
            on_step(f"port {preferred} is taken: PostgreSQL listens on {server.port}")
        self._ports["postgres"] = server.port
        return server.dsn()

    def _kafka_settings(self, servers: str) -> Kafka:
        # Credentials in the environment are for the cluster in the options, not for the embedded.
        environment = {**os.environ, **self._options.environment}
        if not self._options.kafka:
            environment.update(WITHOUT_CREDENTIALS)
        return Kafka.load(environment, kafka=servers, prefix=self._options.prefix)

    async def _migrate(self) -> None:
        try:
            from penstock.postgres.migrations import migrate  # noqa: PLC0415 (optional dependency)
        except ImportError as error:
            raise CannotStart(f"packages are missing: pip install 'penstock[services]' ({error})") from error
        await migrate(self.postgres)

    async def _read_id(self) -> str:
        from penstock.postgres.deployment import read_deployment_id  # noqa: PLC0415 (optional dependency)

        return await read_deployment_id(self.postgres)

    def _start_services(self, gateway_port: int) -> None:
        options = self._options
        environment = {**self.environment, "PENSTOCK_GATEWAY_PORT": str(gateway_port)}
        metrics_port = environment.get(METRICS_PORT) or os.environ.get(METRICS_PORT, "")
        for name, service in options.services.items():
            count = 1 if options.replicas is None else options.replicas.get(name, 0)
            for number in range(1, count + 1):
                replica = name if number == 1 else f"{name}-{number}"
                if metrics_port.isdecimal() and 0 < int(metrics_port) <= MAX_PORT:
                    port = self._choose_metrics_port(replica, int(metrics_port), gateway_port)
                    environment[METRICS_PORT] = str(port)
                self._service_names.append(replica)
                self._running.start(
                    Program(
                        name=replica,
                        argv=service.argv,
                        environment=dict(environment),
                        order=service.order,
                        # Longer than the drain timeout of `process.run`.
                        grace_s=45.0,
                    )
                )

    def _choose_metrics_port(self, replica: str, first: int, gateway_port: int) -> int:
        usual = first + len(self._service_names)
        # None of their services listens yet.
        taken = {gateway_port, *self._metrics_ports.values()}
        port = choose_port(usual if usual <= MAX_PORT and usual not in taken else 0)
        if port != usual:
            self._listener.on_step(f"port {usual} is taken: {replica} has its metrics on {port}")
        self._metrics_ports[replica] = port
        return port

    async def _stop(self) -> None:
        # No process may stay, nor the lock.
        try:
            if self._supervisor is not None:
                await run_to_completion(self._supervisor.close)
        finally:
            if self._log is not None:
                self._log.close()
            if self._data_dir is not None:
                self._data_dir.close()
