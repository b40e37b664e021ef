"""The scenario of a fault test: a deployment, workers, and waves of tasks during which faults are
injected.

    async with run_scenario(tmp_path, "kill") as scenario:
        await scenario.wave("kill -9 stages", lambda: scenario.kill("stages"))

Half of a wave is submitted before its fault and half during it, alternately over the gateway and
the topic. A wave ends before the next one starts, so that repeated executions are counted by fault.
At the end of the block the ledger is compared with PostgreSQL: no task may be lost, doubled or
stale.

PENSTOCK_CHAOS_SEED determines the tasks that fail, the victims of a fault and its moment. It does
not determine races between processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import orjson
from aiokafka.errors import KafkaError

from penstock.checks.app import check
from penstock.client import Client
from penstock.core.restart import RestartPolicy
from penstock.errors import KafkaUnavailable, PenstockError
from penstock.kafka.client.connection import make_producer, running
from penstock.local.deployment import SERVICES, Deployment, Options, Service
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Platform
from tests.chaos import ledger
from tests.chaos.run_report import RUN, Row
from tests.chaos.workers import Workers
from tests.support.services import read
from tests.support.waiting import wait_until

LONG = os.environ.get("PENSTOCK_CHAOS_LONG", "") not in ("", "0")
# Tasks of a scenario, divided among its waves.
TASKS = int(os.environ.get("PENSTOCK_CHAOS_TASKS", "10000" if LONG else "600"))
SEED = RUN.seed = int(os.environ.get("PENSTOCK_CHAOS_SEED") or secrets.randbelow(1_000_000))
STAGES = 3
# More than a pause of a minute, its lease, its session and the back-offs after them.
TIMEOUT_S = 300.0 if LONG else 120.0

# The shortest values: a lease of three beats, and the shortest session that the broker accepts.
LEASE_MS = 3_000
ENVIRONMENT = {"PENSTOCK_SESSION_TIMEOUT_S": "6", "PENSTOCK_RECOUNT_S": "2"}


class Scenario:
    """A running scenario.

    Args:
        name: name of the scenario.
        deployment: the running deployment.
        workers: the worker processes; none runs yet.
        file: path of the ledger.
    """

    def __init__(self, name: str, deployment: Deployment, workers: Workers, file: Path) -> None:
        self.deployment = deployment
        self.workers = workers
        self.rng = random.Random(f"{SEED}/{name}")
        self._name = name
        self._file = file
        self._connection: asyncpg.Connection | None = None
        self._query_lock = asyncio.Lock()
        # Callback targets; each further task has one of them.
        self.targets: Sequence[str] = ()
        # (idempotency key, wave) of every submission that was acknowledged.
        self._acknowledged: list[tuple[str, int]] = []
        self._waves: list[tuple[str, int, float, int]] = []

    async def wave(
        self,
        fault: str,
        inject: Callable[[], Awaitable[object]],
        *,
        tasks: int,
        when_working: Sequence[int] = (),
    ) -> None:
        """Submits `tasks` tasks and injects a fault while they run; returns when all have ended.

        Args:
            fault: name of the fault in the table.
            inject: injects the fault and returns when it is over.
            tasks: number of tasks.
            when_working: processes of workers that must execute a task of the wave before the
                fault; more tasks are submitted until they do.
        """
        wave = len(self._waves)
        exits = self.exits()
        warm_up, until_s = 0, time.monotonic() + TIMEOUT_S
        while not self._work_on(wave, when_working):
            assert time.monotonic() < until_s, f"seed {SEED}: workers {when_working} execute no tasks"
            await self._submit(wave, 50)
            warm_up += 50
            await self.wait_until_true(partial(self._ended, len(self._acknowledged)), "all tasks have ended")
        first, second = tasks // 2, tasks - tasks // 2
        attempts_due = await self.fetch_value("SELECT count(*) FROM penstock.attempt")
        attempts_due += int(first * STAGES * self.rng.uniform(0.1, 0.5))
        await self._submit(wave, first)

        async def far_enough() -> bool:
            return await self.fetch_value("SELECT count(*) FROM penstock.attempt") >= attempts_due

        await self.wait_until_true(far_enough, f"{attempts_due} attempts before {fault}")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._submit(wave, second))
            await inject()
            over_s = time.monotonic()
        await self.wait_until_true(
            partial(self._ended, len(self._acknowledged)), f"every task has ended after {fault}"
        )
        self._waves.append((fault, tasks + warm_up, time.monotonic() - over_s, self.exits() - exits))

    async def _ended(self, count: int) -> bool:
        return (
            await self.fetch_value("SELECT count(*) FROM penstock.task WHERE finished_at IS NOT NULL")
            >= count
        )

    @property
    def acknowledged(self) -> int:
        """The number of tasks whose submission was acknowledged."""
        return len(self._acknowledged)

    @property
    def database_server(self) -> Any:
        """The server of the database, which `stop` and `start` take away and bring back."""
        return self.deployment.embedded_postgres

    @property
    def database_pid(self) -> int:
        """The process of the server of the database."""
        return self.deployment.processes["postgres"]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Signals a service or server, which its supervisor restarts when it ends."""
        self.deployment.kill(name, number)

    async def restart(self, name: str, number: int) -> None:
        """Signals a service or server, which its supervisor restarts, and waits until it has
        ended."""
        exits = self.deployment.exits(name)
        self.deployment.kill(name, number)
        await self.wait_until_true(lambda: self.deployment.exits(name) > exits, f"{name} has ended")

    def groups(self, victims: Iterable[str], *, at_once: int = 2) -> list[list[str]]:
        """The victims in random order: one by one in the full form, in groups of `at_once` in the
        short one."""
        order = list(victims)
        self.rng.shuffle(order)
        size = 1 if LONG else at_once
        return [order[start : start + size] for start in range(0, len(order), size)]

    async def stop_for(self, seconds: float, *pids: int) -> None:
        """Pauses processes, as the migration of a virtual machine or a full disk does."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def _work_on(self, wave: int, pids: Sequence[int]) -> bool:
        """Whether each of these workers has started an execution in this wave."""
        # The id of a worker consists of host, process and a random part.
        seen = {x.worker.rsplit("-", 2)[1] for x in ledger.read(self._file) if x.wave == wave}
        return {str(pid) for pid in pids} <= seen

    async def fetch_value(self, statement: str) -> Any:
        """Fetches one value from the database, and retries while its server restarts."""

        async def answer() -> tuple[Any] | None:
            async with self._query_lock:
                try:
                    if self._connection is None or self._connection.is_closed():
                        self._connection = await asyncpg.connect(self.deployment.postgres, timeout=5)
                    return (await self._connection.fetchval(statement, timeout=30),)
                except (
                    OSError,
                    asyncpg.PostgresError,
                    asyncpg.InterfaceError,
                    # Raised when the connection is lost between preparing and executing.
                    asyncpg.InternalClientError,
                ):
                    self._connection = None
                    return None

        return (await wait_until(answer, timeout=TIMEOUT_S, every=0.1, what=statement))[0]

    async def wait_until_true(self, condition: Callable[[], Any], what: str) -> None:
        """Waits for a condition, and adds the state of the deployment to the error after a
        timeout."""
        try:
            await wait_until(condition, timeout=TIMEOUT_S, every=0.05, what=f"seed {SEED}: {what}")
        except TimeoutError as timeout:
            try:
                report = await check(Platform.load(self.deployment.environment))
                timeout.add_note(f"tasks: {report.tasks}; check: {report.offenders[:5]}")
            except PenstockError as error:
                timeout.add_note(f"the check failed: {error}")
            timeout.add_note(str(self.deployment.log_file))
            raise

    def exits(self) -> int:
        """How often services have ended."""
        return self.exits_by_process().total()

    def exits_by_process(self) -> Counter[str]:
        """How often each process of a service has ended."""
        return Counter({name: self.deployment.exits(name) for name in self.service_processes()})

    def service_processes(self) -> list[str]:
        """The names of the services' processes: with replicas, `stages` and `stages-2`."""
        return list(self.deployment._service_names)

    def _draft(self, wave: int) -> dict[str, Any]:
        fails = self.rng.randrange(STAGES) if self.rng.random() < 0.05 else None
        key = f"{wave}-{self.rng.getrandbits(64):016x}"
        context = {"n": 0, "by": [], "wave": wave, "fails": fails, "key": key}
        # With events for all transitions, every transaction writes to the outbox.
        draft = {"type": "count", "context": context, "events": "all", "idempotency_key": key}
        if self.targets:
            draft["callbacks"] = [self.rng.choice(self.targets)]
        return draft

    async def _submit(self, wave: int, count: int) -> None:
        """Returns when every task is acknowledged; retries the others with their idempotency
        keys."""
        drafts = [self._draft(wave) for _ in range(count)]
        async with Client(self.deployment.gateway_url, patience_s=TIMEOUT_S) as client:
            await asyncio.gather(client.submit_many(drafts[::2]), self._produce(drafts[1::2]))
        self._acknowledged += [(draft["idempotency_key"], wave) for draft in drafts]

    async def _produce(self, drafts: list[dict]) -> None:
        topic = self.deployment.environment["PENSTOCK_PREFIX"] + "submitted"
        unsent = [orjson.dumps(draft) for draft in drafts]

        async def sent() -> bool:
            nonlocal unsent
            try:
                async with running(make_producer(settings)) as producer:
                    sending = [producer.send_and_wait(topic, record) for record in unsent]
                    outcomes = await asyncio.gather(*sending, return_exceptions=True)
            except (KafkaError, KafkaUnavailable):
                return False
            unsent = [
                record
                for record, outcome in zip(unsent, outcomes, strict=True)
                if isinstance(outcome, BaseException)
            ]
            return not unsent

        settings = Platform.load(self.deployment.environment)
        await wait_until(sent, timeout=TIMEOUT_S, every=0.2, what="Kafka acknowledges every submission")

    async def verify(self) -> None:
        """Counts effects, executions and events independently, and adds the counts to the
        report."""
        connection = await asyncpg.connect(self.deployment.postgres)
        try:
            await ledger.load(connection, self._file, self._acknowledged)
            for wave, (fault, tasks, seconds, exits) in enumerate(self._waves):
                counts = await ledger.count_wave(connection, wave)
                RUN.rows.append(Row(self._name, fault, tasks, counts, round(seconds, 1), exits))
            found = await ledger.violations(connection)
        finally:
            await connection.close()
        RUN.note(found)
        broken = {claim: offenders[:5] for claim, offenders in found.items() if offenders}
        assert not broken, f"seed {SEED}, {self._name}: {broken}; {self.deployment.log_file}"
        await self._verify_clean()
        await self._verify_events()

    async def _verify_clean(self) -> None:
        settings = Platform.load(self.deployment.environment)

        async def clean() -> bool:
            return (await check(settings)).clean

        await self.wait_until_true(clean, "penstock check is clean")

    async def _verify_events(self) -> None:
        """Each transition has at least one event, and the outbox is empty."""

        async def outbox_empty() -> bool:
            return await self.fetch_value("SELECT count(*) FROM penstock.outbox") == 0

        await self.wait_until_true(outbox_empty, "the outbox is empty")
        events = await read(self.deployment.kafka, self.deployment.environment["PENSTOCK_PREFIX"] + "events")
        counts_by_event = Counter({event["id"]: event["event"] for event in events}.values())
        count = len(self._acknowledged)
        assert counts_by_event["task.succeeded"] == count, "C1: every transition has an event"
        assert counts_by_event["task.advanced"] == (STAGES - 1) * count

    async def close(self) -> None:
        """Closes the connection to the database."""
        if self._connection is not None:
            await self._connection.close()


S = TypeVar("S", bound=Scenario)


@asynccontextmanager
async def run_scenario(
    folder: Path,
    name: str,
    *,
    workers: int = 2,
    services: Mapping[str, Service] = SERVICES,
    environment: Mapping[str, str] = ENVIRONMENT,
    statuses: frozenset[int] = frozenset({0}),
    lease_ms: int = LEASE_MS,
    max_losses: int = 3,
    postgres: str | None = None,
    replicas: Mapping[str, int] | None = None,
    kafka: str | None = None,
    objects: str | None = None,
    gateway_port: int = 0,
    kind: type[S] = Scenario,  # type: ignore[assignment]  # a default of a type variable
) -> AsyncIterator[S]:
    """Runs a scenario with `workers` workers and verifies it at the end of the block.

    The workers must end with one of `statuses`. `postgres` is the URL of servers that run already,
    and `kafka` are the bootstrap servers of a cluster that does. `objects` is the URL of an object
    store. A task may lose `max_losses` workers in a stage. `replicas` are the processes of each
    service; None is one of each.
    """
    options = Options(
        data_dir=folder / "data",
        # Not the default ports, which another deployment may use.
        kafka_port=0,
        postgres_port=0,
        postgres=postgres,
        kafka=kafka,
        objects=objects,
        gateway_port=gateway_port,
        services=services,
        replicas=replicas,
        environment=environment,
        # A service that is killed often must not wait longer and longer for its restart.
        restart=RestartPolicy(longest_s=2.0),
    )
    async with Deployment(options) as deployment:
        async with open_pool(deployment.postgres, "test", size=1) as pool:
            # Enough attempts for every fault.
            policy = {"lease_ms": lease_ms, "max_attempts": 50, "retry_base_ms": 100, "retry_max_ms": 1_000}
            policy["max_losses"] = max_losses
            await types.register(pool, types.TaskType(name="count", first_stage="one", **policy))
        worker_processes = Workers(deployment.environment, folder / "ledger", folder / "workers.log")
        scenario = kind(name, deployment, worker_processes, folder / "ledger")
        try:
            try:
                for _ in range(workers):
                    worker_processes.start()
                yield scenario
            finally:
                ended = await asyncio.to_thread(worker_processes.stop)
            assert set(ended) <= statuses, f"a worker ended with another status when stopped: {ended}"
            await scenario.verify()
        finally:
            await scenario.close()
