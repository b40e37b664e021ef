"""Where a fault test takes place: a deployment of its own, workers, and waves of tasks through which faults strike.

    async with arena(tmp_path, "kill") as field:
        await field.wave("kill -9 stages", lambda: field.kill("stages"))

A wave is submitted half before its fault and half while it lasts, by turns over the gateway and over the topic, and
has ended before the next begins: so what was executed again is counted by fault. At the end of the block the ledger
is laid beside PostgreSQL, and nothing may be lost, doubled or stale.

Which tasks fail of themselves, whom a fault strikes and when is drawn from PENSTOCK_CHAOS_SEED; how processes then race
with each other is not.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import orjson
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from penstock.checks.app import check
from penstock.client import Client
from penstock.core.restart import RestartPolicy
from penstock.local.deployment import SERVICES, Deployment, Options, Service
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Platform
from tests.chaos import ledger
from tests.chaos.figures import RUN, Row
from tests.chaos.workers import Workers
from tests.running import producing, read
from tests.waiting import wait_until

LONG = os.environ.get("PENSTOCK_CHAOS_LONG", "") not in ("", "0")
# Tasks of a scenario, shared by its waves.
TASKS = int(os.environ.get("PENSTOCK_CHAOS_TASKS", "10000" if LONG else "1000"))
SEED = RUN.seed = int(os.environ.get("PENSTOCK_CHAOS_SEED") or secrets.randbelow(1_000_000))
STAGES = 3
# Above a minute's pause, its lease, its session and the back-offs after them.
PATIENCE_S = 300.0 if LONG else 120.0

# As short as they may be: a lease of three beats, the shortest session that the broker takes.
LEASE_MS = 3_000
ENVIRONMENT = {"PENSTOCK_SESSION_TIMEOUT_S": "6", "PENSTOCK_RECOUNT_S": "2"}


class Field:
    """A running scenario.

    Args:
        name: of the scenario.
        deployment: entered.
        workers: none is started yet.
        file: the ledger.
    """

    def __init__(self, name: str, deployment: Deployment, workers: Workers, file: Path) -> None:
        self.deployment = deployment
        self.workers = workers
        self.chance = random.Random(f"{SEED}/{name}")
        self._name = name
        self._file = file
        self._connection: asyncpg.Connection | None = None
        # (idempotency key, wave) of every submission that was acknowledged.
        self._acknowledged: list[tuple[str, int]] = []
        self._waves: list[tuple[str, int, float, int]] = []

    async def wave(self, fault: str, strike: Callable[[], Awaitable[object]], *, tasks: int) -> None:
        """Sends `tasks` tasks through and strikes in their midst; returns when all of them have ended.

        Args:
            fault: its name in the table.
            strike: returns when the fault is over.
            tasks: how many.
        """
        wave, before = len(self._waves), len(self._acknowledged)
        exits = self._exits()
        await self._submit(wave, tasks // 2)
        share = self.chance.uniform(0.1, 0.5)
        due = await self.ask("SELECT count(*) FROM penstock.attempt") + int(tasks // 2 * STAGES * share)

        async def far_enough() -> bool:
            return await self.ask("SELECT count(*) FROM penstock.attempt") >= due

        # By the tasks that had ended before, some attempts may be counted already: then it strikes the sooner.
        await self._await(far_enough, f"{due} attempts before {fault}")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._submit(wave, tasks - tasks // 2))
            await strike()
            over_s = time.monotonic()

        async def ended() -> bool:
            count = await self.ask("SELECT count(*) FROM penstock.task WHERE finished_at IS NOT NULL")
            return count >= before + tasks

        await self._await(ended, f"every task has ended after {fault}")
        self._waves.append((fault, tasks, time.monotonic() - over_s, self._exits() - exits))

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Signals a service or server; it is started again when it ends."""
        self.deployment.kill(name, number)

    async def restart(self, name: str, number: int) -> None:
        """Signals a service or server and waits until it has ended; its supervisor starts it again."""
        exits = self.deployment.exits(name)
        self.deployment.kill(name, number)
        await self._await(lambda: self.deployment.exits(name) > exits, f"{name} has ended")

    async def stop_for(self, seconds: float, *pids: int) -> None:
        """Stops processes for a while, as a virtual machine that is moved or a full disk does."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    async def working(self, *pids: int) -> None:
        """Waits until each of these workers has begun an execution in the present wave."""
        wave = len(self._waves)

        def all_work() -> bool:
            seen = {x.worker.rsplit("-", 2)[1] for x in ledger.read(self._file) if x.wave == wave}
            return {str(pid) for pid in pids} <= seen

        await self._await(all_work, f"workers {pids} take part")

    async def ask(self, statement: str) -> Any:
        """One value from the database, however often its server is started again meanwhile."""

        async def answer() -> tuple[Any] | None:
            try:
                if self._connection is None or self._connection.is_closed():
                    self._connection = await asyncpg.connect(self.deployment.postgres, timeout=5)
                return (await self._connection.fetchval(statement, timeout=30),)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                self._connection = None
                return None

        return (await wait_until(answer, timeout=PATIENCE_S, every=0.1, what=statement))[0]

    async def _await(self, condition: Callable[[], Any], what: str) -> None:
        try:
            await wait_until(condition, timeout=PATIENCE_S, every=0.05, what=f"seed {SEED}: {what}")
        except TimeoutError as late:
            report = await check(Platform.load(self.deployment.environment))
            late.add_note(f"tasks: {report.tasks}; check: {report.offenders[:5]}; {self.deployment.log_file}")
            raise

    def _exits(self) -> int:
        return sum(self.deployment.exits(name) for name in SERVICES)

    async def _submit(self, wave: int, count: int) -> None:
        """Returns when every one is acknowledged; what is not is sent again under its key."""
        drafts = []
        for _ in range(count):
            fails = self.chance.randrange(STAGES) if self.chance.random() < 0.05 else None
            context = {"n": 0, "by": [], "wave": wave, "fails": fails}
            key = f"{wave}-{self.chance.getrandbits(64):016x}"
            # Every transition is asked for, so that the outbox has work in every transaction.
            drafts.append({"type": "count", "context": context, "events": "all", "idempotency_key": key})
        async with Client(self.deployment.gateway_url, patience_s=PATIENCE_S) as client:
            await asyncio.gather(client.submit_many(drafts[::2]), self._produce(drafts[1::2]))
        self._acknowledged += [(draft["idempotency_key"], wave) for draft in drafts]

    async def _produce(self, drafts: list[dict]) -> None:
        topic = self.deployment.environment["PENSTOCK_PREFIX"] + "submitted"

        async def send(producer: AIOKafkaProducer, draft: dict) -> None:
            async def sent() -> bool:
                try:
                    await producer.send_and_wait(topic, orjson.dumps(draft))
                except KafkaError:
                    return False
                return True

            await wait_until(sent, timeout=PATIENCE_S, every=0.2, what="Kafka takes a submission")

        async with producing(self.deployment.kafka) as producer:
            await asyncio.gather(*[send(producer, draft) for draft in drafts])

    async def verify(self) -> None:
        """Counts effects, executions and events from outside, and writes the figures down."""
        connection = await asyncpg.connect(self.deployment.postgres)
        try:
            await ledger.load(connection, self._file, self._acknowledged)
            for wave, (fault, tasks, seconds, exits) in enumerate(self._waves):
                counted = await ledger.figures(connection, wave)
                RUN.rows.append(Row(self._name, fault, tasks, counted, round(seconds, 1), exits))
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

        await self._await(clean, "penstock check is clean")

    async def _verify_events(self) -> None:
        """Each transition's id is there, some perhaps more than once, and nothing waits in the outbox."""

        async def paid() -> bool:
            return await self.ask("SELECT count(*) FROM penstock.outbox") == 0

        await self._await(paid, "the outbox is empty")
        events = await read(self.deployment.kafka, self.deployment.environment["PENSTOCK_PREFIX"] + "events")
        told = Counter({event["id"]: event["event"] for event in events}.values())
        count = len(self._acknowledged)
        assert told["task.succeeded"] == count, "C1: no transition goes untold"
        assert told["task.advanced"] == (STAGES - 1) * count

    async def close(self) -> None:
        """Lets go of the database."""
        if self._connection is not None:
            await self._connection.close()


@asynccontextmanager
async def arena(
    folder: Path,
    name: str,
    *,
    workers: int = 2,
    services: Mapping[str, Service] = SERVICES,
) -> AsyncIterator[Field]:
    """A field with this many workers; what was done on it is verified at the end of the block."""
    options = Options(
        data_dir=folder / "data",
        # No default ports: others may be running here.
        kafka_port=0,
        postgres_port=0,
        gateway_port=0,
        services=services,
        environment=ENVIRONMENT,
        # Whoever is killed often shall not be waited for ever longer.
        restart=RestartPolicy(longest_s=2.0),
    )
    async with Deployment(options) as deployment:
        async with open_pool(deployment.postgres, "test", size=1) as pool:
            # Enough tries for every fault.
            policy = {"lease_ms": LEASE_MS, "max_attempts": 50, "retry_base_ms": 100, "retry_max_ms": 1_000}
            await types.register(pool, types.TaskType(name="count", first_stage="one", **policy))
        crew = Workers(deployment.environment, folder / "ledger", folder / "workers.log")
        field = Field(name, deployment, crew, folder / "ledger")
        try:
            try:
                for _ in range(workers):
                    crew.start()
                yield field
            finally:
                statuses = await asyncio.to_thread(crew.stop)
            assert set(statuses) <= {0}, f"a worker that was told to stop did not stop well: {statuses}"
            await field.verify()
        finally:
            await field.close()
