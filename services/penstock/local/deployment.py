"""A whole deployment on this machine, for the time of an `async with` block.

    async with Deployment(Options(data_dir=path)) as deployment:
        ...  # deployment.gateway_url, deployment.kafka, deployment.postgres, deployment.kill("stages")

Used by `penstock up`, the demo, the benchmarks and the tests. Inside the block every service has said that it
serves; leaving it stops the services first (those that let work in before those that finish it), then the servers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from penstock.core.restart import RestartPolicy
from penstock.discovery import DEFAULT_DATA_DIR, WITHOUT_CREDENTIALS, Addresses
from penstock.errors import CannotStart, SettingsError
from penstock.kafka.connection import create_topics, wait_kafka
from penstock.kafka.topics import PLATFORM
from penstock.local.broker import EmbeddedKafka
from penstock.local.database import EmbeddedPostgres
from penstock.local.jars import Progress
from penstock.local.leftovers import end_leftovers
from penstock.local.output import FileLog, both
from penstock.local.ports import LOOPBACK, choose_port
from penstock.local.side_by_side import run_both, to_the_end
from penstock.local.state import CALLBACK_ALLOW, CALLBACK_SECRETS, DataDir, callback_allow, make_secret
from penstock.local.supervisor import OnLine, Program, Supervisor
from penstock.process import exit_status
from penstock.settings import Kafka

DEFAULT_GATEWAY_PORT = 8420
GATEWAY = "gateway"

# Ends of a service, in a row and before it ever served, after which it is not worth waiting for.
_HOPELESS_EXITS = 3
# The status of a service for which something is wrong that stays so.
_REFUSES = exit_status(SettingsError())


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service as it is run here.

    Attributes:
        argv: the command; the settings come by environment.
        order: services of the lowest order are stopped first.
    """

    argv: tuple[str, ...]
    order: int


def _run(service: str, order: int) -> Service:
    return Service(argv=(sys.executable, "-m", "penstock", "run", service), order=order)


METRICS_PORT = "PENSTOCK_METRICS_PORT"
# What lets work in stops first, so that what finishes work can settle it.
SERVICES: Mapping[str, Service] = {
    GATEWAY: _run("gateway", 0),
    "task-sync": _run("task-sync", 0),
    "heartbeats": _run("heartbeats", 1),
    "stages": _run("stages", 2),
    "callbacks": _run("callbacks", 3),
}
_SERVERS_ORDER = 9


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to start, and where.

    Attributes:
        data_dir: everything that lasts: data of the servers, objects, the log.
        fresh: drop what an earlier run left in `data_dir`.
        kafka: bootstrap servers of a cluster that exists; None starts one.
        postgres: URL of a database that exists; None starts a server.
        prefix: of topics and groups.
        objects: URL of the object store; None is a folder in `data_dir`.
        gateway_port: preferred; another is chosen when it is taken. 0 prefers none.
        kafka_port: the same for an embedded broker.
        postgres_port: the same for an embedded database.
        replicas: how many of each service; what is absent is not started. None starts one of each.
        services: the table of services; tests put their own in.
        environment: further settings for the services.
        restart: how fast what dies is started again.
        start_timeout_s: seconds that each part may take to serve.
    """

    data_dir: Path = DEFAULT_DATA_DIR
    fresh: bool = False
    kafka: str | None = None
    postgres: str | None = None
    prefix: str = "penstock."
    objects: str | None = None
    gateway_port: int = DEFAULT_GATEWAY_PORT
    kafka_port: int = 9092
    postgres_port: int = 5432
    replicas: Mapping[str, int] | None = None
    services: Mapping[str, Service] = field(default_factory=lambda: SERVICES)
    environment: Mapping[str, str] = field(default_factory=dict)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    start_timeout_s: float = 60.0

    def validate(self) -> list[str]:
        """Problems across fields, one sentence each."""
        problems = Kafka(kafka=self.kafka).validate() if self.kafka else []
        wanted = self.replicas if self.replicas is not None else {}
        unknown = sorted(set(wanted) - set(self.services))
        if unknown:
            problems.append(
                f"replicas names {', '.join(unknown)}, but services has only {', '.join(self.services)}"
            )
        if wanted.get(GATEWAY, 1) > 1:
            problems.append(
                f"replicas={GATEWAY}:{wanted[GATEWAY]}, but gateway_port={self.gateway_port} is for one"
            )
        if self.fresh and self.kafka and self.postgres:
            problems.append("fresh drops embedded data, but kafka and postgres are both servers that exist")
        return problems


@dataclass(frozen=True)
class Reporter:
    """Who hears how the start goes on; by default nobody.

    Attributes:
        step: told what is being done, in a few words.
        fetching: told (jars fetched, jars in all).
        line: receives every line of every program, from any thread.
    """

    step: Callable[[str], None] = lambda _text: None
    fetching: Progress = lambda _done, _total: None
    line: OnLine = lambda _name, _line: None


class Deployment:
    """Starts everything on entering, stops everything on leaving.

    Raises (on entering):
        CannotStart: something is missing or does not come up.
        SettingsError: the options contradict each other.
        Unavailable: a server that should exist does not answer.
    """

    def __init__(self, options: Options, reporter: Reporter | None = None) -> None:
        problems = options.validate()
        if problems:
            raise SettingsError("; ".join(problems))
        self._options = options
        self._reporter = reporter or Reporter()
        self._supervisor: Supervisor | None = None
        self._data_dir: DataDir | None = None
        self._log: FileLog | None = None
        self._addresses: Addresses | None = None
        self._service_names: list[str] = []
        self._secret = ""
        self.embedded_kafka: EmbeddedKafka | None = None
        self.embedded_postgres: EmbeddedPostgres | None = None

    @property
    def addresses(self) -> Addresses:
        """Where everything is."""
        assert self._addresses is not None, "the deployment has not been entered"
        return self._addresses

    @property
    def kafka(self) -> str:
        """Bootstrap servers."""
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
    def environment(self) -> dict[str, str]:
        """The settings under which a worker, client or further service finds this deployment."""
        options = self._options
        # Whoever has servers elsewhere is no longer trying things out, and may have more to protect here.
        allow = callback_allow(trying_out=not (options.kafka and options.postgres))
        own = {CALLBACK_SECRETS: self._secret, CALLBACK_ALLOW: allow}
        return {**own, **options.environment, **self.addresses.environment()}

    @property
    def data_dir(self) -> Path:
        """Where the data and the log are."""
        return self._options.data_dir.absolute()

    @property
    def log_file(self) -> Path:
        """Every line of every program."""
        return self.data_dir / "log" / "penstock.log"

    @property
    def callback_secret_file(self) -> Path:
        """Where the secret that signs callbacks is kept, unless the environment has one."""
        return self.data_dir / "callback-secret"

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by name, of those that run now: services, `kafka`, `postgres`."""
        return self._running.processes()

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to one process and returns its id; what ends is started again, with back-off.

        Raises:
            NotFound: nothing of that name runs now.
        """
        return self._running.kill(name, number)

    def exits(self, name: str) -> int:
        """How often `name` has ended by itself."""
        return self._running.exits(name)

    def hurry(self) -> None:
        """Kills everything at once, for whoever does not want to wait."""
        if self._supervisor is not None:
            self._supervisor.hurry()

    async def wait_ready(self, names: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Waits until services serve, all of them by default; after a kill, until the successor does.

        Raises:
            CannotStart: one does not, or refuses to for its settings; the message has its last lines.
        """
        timeout_s = self._options.start_timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        before = {
            name: self._running.exits(name) for name in (self._service_names if names is None else names)
        }
        # All at once: one that refuses is not to wait for those before it.
        while waiting := [name for name in before if not self._running.is_ready(name)]:
            ended = {name: self._running.exits(name) - before[name] for name in waiting}
            for name, times in ended.items():
                if times and self._running.last_status(name) == _REFUSES:
                    # It would say the same again: nobody changes its settings while we run.
                    raise CannotStart(f"{name} refuses to start:\n{self._running.tail(name)}")
            late = asyncio.get_running_loop().time() > deadline
            for name, times in ended.items():
                if late or times >= _HOPELESS_EXITS:
                    raise CannotStart(f"{name} does not come up; its last lines:\n{self._running.tail(name)}")
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
        assert self._supervisor is not None, "the deployment has not been entered"
        return self._supervisor

    async def _start(self) -> None:
        options, say = self._options, self._reporter.step
        self._data_dir = DataDir(options.data_dir)
        run_dir = self.data_dir / "run"
        for leftover in await asyncio.to_thread(end_leftovers, run_dir):
            say(f"ended what an earlier run left behind: {leftover}")
        if options.fresh:
            say(f"dropping the data in {self.data_dir}")
            for name in ("kafka", "postgres", "objects"):
                await asyncio.to_thread(shutil.rmtree, self.data_dir / name, ignore_errors=True)
        self._log = FileLog(self.log_file)
        self._supervisor = Supervisor(
            both(self._log, self._reporter.line), run_dir=run_dir, policy=options.restart
        )
        # Both at once: each waits mostly for the disk or for itself.
        kafka, postgres = await run_both(self._start_kafka(), self._start_postgres())
        objects = options.objects or f"file://{self.data_dir / 'objects'}"
        if not options.objects:
            (self.data_dir / "objects").mkdir(exist_ok=True)
        port = choose_port(options.gateway_port)
        if options.gateway_port not in (0, port):
            say(f"port {options.gateway_port} is taken: the gateway listens on {port}")
        self._addresses = Addresses(
            pid=os.getpid(),
            gateway=f"http://{LOOPBACK}:{port}",
            kafka=kafka,
            postgres=postgres,
            prefix=options.prefix,
            objects=objects,
            embedded_kafka=not options.kafka,
        )
        self._secret = os.environ.get(CALLBACK_SECRETS) or make_secret(self.callback_secret_file)
        say("creating topics and tables")
        await run_both(self._create_topics(), self._migrate())
        say("starting services")
        self._start_services(port)
        await self.wait_ready()
        self._data_dir.publish(self._addresses)

    async def _start_kafka(self) -> str:
        options, say = self._options, self._reporter.step
        if options.kafka:
            await wait_kafka(self._kafka_settings(options.kafka), timeout_s=15)
            return options.kafka
        say("starting Kafka")
        broker = EmbeddedKafka(
            self._running, self.data_dir / "kafka", port=options.kafka_port, order=_SERVERS_ORDER
        )
        self.embedded_kafka = broker
        await broker.start(progress=self._reporter.fetching, timeout_s=options.start_timeout_s)
        if options.kafka_port not in (0, broker.port):
            say(f"port {options.kafka_port} is taken: Kafka listens on {broker.port}")
        return broker.servers

    async def _start_postgres(self) -> str:
        options, say = self._options, self._reporter.step
        if options.postgres:
            return options.postgres
        say("starting PostgreSQL")
        server = EmbeddedPostgres(
            self._running, self.data_dir / "postgres", port=options.postgres_port, order=_SERVERS_ORDER
        )
        self.embedded_postgres = server
        await server.start(timeout_s=options.start_timeout_s)
        if options.postgres_port not in (0, server.port):
            say(f"port {options.postgres_port} is taken: PostgreSQL listens on {server.port}")
        return server.dsn()

    async def _create_topics(self) -> None:
        await create_topics(self._kafka_settings(self.kafka), PLATFORM)

    def _kafka_settings(self, servers: str) -> Kafka:
        # Credentials in the environment are for the cluster that the options name; ours asks for none.
        environment = {**os.environ, **self._options.environment}
        if not self._options.kafka:
            environment.update(WITHOUT_CREDENTIALS)
        return Kafka.load(environment, kafka=servers, prefix=self._options.prefix)

    async def _migrate(self) -> None:
        try:
            from penstock.postgres.migrations import migrate  # noqa: PLC0415 (optional dependency)
        except ImportError as error:
            raise CannotStart(
                f"the services need more packages: pip install 'penstock[services]' ({error})"
            ) from error
        await migrate(self.postgres)

    def _start_services(self, gateway_port: int) -> None:
        options = self._options
        environment = {**self.environment, "PENSTOCK_GATEWAY_PORT": str(gateway_port)}
        metrics_port = environment.get(METRICS_PORT) or os.environ.get(METRICS_PORT, "")
        for name, service in options.services.items():
            count = 1 if options.replicas is None else options.replicas.get(name, 0)
            for number in range(1, count + 1):
                replica = name if number == 1 else f"{name}-{number}"
                if metrics_port.isdecimal() and int(metrics_port):
                    # One port cannot be everybody's.
                    environment[METRICS_PORT] = str(int(metrics_port) + len(self._service_names))
                self._service_names.append(replica)
                self._running.start(
                    Program(
                        name=replica,
                        argv=service.argv,
                        environment=dict(environment),
                        order=service.order,
                        # Longer than `process.run` gives a drain, so that it, not we, cuts it short.
                        grace_s=45.0,
                    )
                )

    async def _stop(self) -> None:
        # Each later step is taken whatever becomes of the earlier ones: nothing must keep running, nor hold the lock.
        try:
            if self._supervisor is not None:
                await to_the_end(self._supervisor.close)
        finally:
            if self._log is not None:
                self._log.close()
            if self._data_dir is not None:
                self._data_dir.close()
