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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import orjson
from aiokafka.errors import KafkaError

from penstock.checks.app import check
from penstock.client import Client
from penstock.core.restart import RestartPolicy
from penstock.errors import KafkaUnavailable, PenstockError
from penstock.kafka.connection import make_producer, running
from penstock.local.deployment import SERVICES, Deployment, Options, Service
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Platform
from tests.chaos import ledger
from tests.chaos.figures import RUN, Row
from tests.chaos.workers import Workers
from tests.running import read
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
        self._asking = asyncio.Lock()
        # Of each task that is submitted from now on, one of them is told what becomes of it.
        self.targets: Sequence[str] = ()
        # (idempotency key, wave) of every submission that was acknowledged.
        self._acknowledged: list[tuple[str, int]] = []
        self._waves: list[tuple[str, int, float, int]] = []

    async def wave(
        self,
        fault: str,
        strike: Callable[[], Awaitable[object]],
        *,
        tasks: int,
        when_working: Sequence[int] = (),
    ) -> None:
        """Sends `tasks` tasks through and strikes in their midst; returns when all of them have ended.

        Args:
            fault: its name in the table.
            strike: returns when the fault is over.
            tasks: how many.
            when_working: processes of workers that must have a part in the wave before it strikes; it is sent
                more tasks until they have.
        """
        wave = len(self._waves)
        exits = self._exits()
        warm_up, until_s = 0, time.monotonic() + PATIENCE_S
        while not self._take_part(wave, when_working):
            assert time.monotonic() < until_s, f"seed {SEED}: workers {when_working} do not take part again"
            await self._submit(wave, 50)
            warm_up += 50
            await self.until(partial(self._ended, len(self._acknowledged)), "what was sent has ended")
        first, second = tasks // 2, tasks - tasks // 2
        due = await self.ask("SELECT count(*) FROM penstock.attempt")
        due += int(first * STAGES * self.chance.uniform(0.1, 0.5))
        await self._submit(wave, first)

        async def far_enough() -> bool:
            return await self.ask("SELECT count(*) FROM penstock.attempt") >= due

        await self.until(far_enough, f"{due} attempts before {fault}")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._submit(wave, second))
            await strike()
            over_s = time.monotonic()
        await self.until(partial(self._ended, len(self._acknowledged)), f"every task has ended after {fault}")
        self._waves.append((fault, tasks + warm_up, time.monotonic() - over_s, self._exits() - exits))

    async def _ended(self, count: int) -> bool:
        return await self.ask("SELECT count(*) FROM penstock.task WHERE finished_at IS NOT NULL") >= count

    @property
    def acknowledged(self) -> int:
        """Tasks whose submission was acknowledged."""
        return len(self._acknowledged)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Signals a service or server; it is started again when it ends."""
        self.deployment.kill(name, number)

    async def restart(self, name: str, number: int) -> None:
        """Signals a service or server and waits until it has ended; its supervisor starts it again."""
        exits = self.deployment.exits(name)
        self.deployment.kill(name, number)
        await self.until(lambda: self.deployment.exits(name) > exits, f"{name} has ended")

    def parties(self, victims: Iterable[str]) -> list[list[str]]:
        """The victims in the order of this seed: one by one in the full form, by twos in the short one."""
        order = list(victims)
        self.chance.shuffle(order)
        size = 1 if LONG else 2
        return [order[start : start + size] for start in range(0, len(order), size)]

    async def stop_for(self, seconds: float, *pids: int) -> None:
        """Stops processes for a while, as a virtual machine that is moved or a full disk does."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def _take_part(self, wave: int, pids: Sequence[int]) -> bool:
        """Whether each of these workers has begun an execution in this wave."""
        # The id of a worker: host, process, something random.
        seen = {x.worker.rsplit("-", 2)[1] for x in ledger.read(self._file) if x.wave == wave}
        return {str(pid) for pid in pids} <= seen

    async def ask(self, statement: str) -> Any:
        """One value from the database, however often its server is started again meanwhile."""

        async def answer() -> tuple[Any] | None:
            async with self._asking:
                try:
                    if self._connection is None or self._connection.is_closed():
                        self._connection = await asyncpg.connect(self.deployment.postgres, timeout=5)
                    return (await self._connection.fetchval(statement, timeout=30),)
                except (
                    OSError,
                    asyncpg.PostgresError,
                    asyncpg.InterfaceError,
                    # How it puts the loss of a connection between preparing and asking.
                    asyncpg.InternalClientError,
                ):
                    self._connection = None
                    return None

        return (await wait_until(answer, timeout=PATIENCE_S, every=0.1, what=statement))[0]

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Waits, and says what the system is like if that takes too long."""
        try:
            await wait_until(condition, timeout=PATIENCE_S, every=0.05, what=f"seed {SEED}: {what}")
        except TimeoutError as late:
            try:
                report = await check(Platform.load(self.deployment.environment))
                late.add_note(f"tasks: {report.tasks}; check: {report.offenders[:5]}")
            except PenstockError as error:
                late.add_note(f"and the check: {error}")
            late.add_note(str(self.deployment.log_file))
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
            draft = {"type": "count", "context": context, "events": "all", "idempotency_key": key}
            if self.targets:
                draft["callbacks"] = [self.chance.choice(self.targets)]
            drafts.append(draft)
        async with Client(self.deployment.gateway_url, patience_s=PATIENCE_S) as client:
            await asyncio.gather(client.submit_many(drafts[::2]), self._produce(drafts[1::2]))
        self._acknowledged += [(draft["idempotency_key"], wave) for draft in drafts]

    async def _produce(self, drafts: list[dict]) -> None:
        topic = self.deployment.environment["PENSTOCK_PREFIX"] + "submitted"
        left = [orjson.dumps(draft) for draft in drafts]

        async def sent() -> bool:
            nonlocal left
            try:
                async with running(make_producer(settings)) as producer:
                    sending = [producer.send_and_wait(topic, record) for record in left]
                    ends = await asyncio.gather(*sending, return_exceptions=True)
            except (KafkaError, KafkaUnavailable):
                return False
            left = [record for record, end in zip(left, ends, strict=True) if isinstance(end, BaseException)]
            return not left

        settings = Platform.load(self.deployment.environment)
        await wait_until(sent, timeout=PATIENCE_S, every=0.2, what="Kafka takes every submission")

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

        await self.until(clean, "penstock check is clean")

    async def _verify_events(self) -> None:
        """Each transition's id is there, some perhaps more than once, and nothing waits in the outbox."""

        async def paid() -> bool:
            return await self.ask("SELECT count(*) FROM penstock.outbox") == 0

        await self.until(paid, "the outbox is empty")
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
    environment: Mapping[str, str] = ENVIRONMENT,
    statuses: frozenset[int] = frozenset({0}),
) -> AsyncIterator[Field]:
    """A field with this many workers, which end with one of `statuses`; what was done is verified at the end of the block."""
    options = Options(
        data_dir=folder / "data",
        # No default ports: others may be running here.
        kafka_port=0,
        postgres_port=0,
        gateway_port=0,
        services=services,
        environment=environment,
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
                ended = await asyncio.to_thread(crew.stop)
            assert set(ended) <= statuses, f"a worker that was told to stop did not stop well: {ended}"
            await field.verify()
        finally:
            await field.close()
