"""Pausing and resuming tasks in flight on workers, with the real Kafka and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.gateways import Caller, running_gateway
from tests.support.pipeline import System
from tests.support.services import make_topics, read, running_service
from tests.support.waiting import wait_until

from penstock.checks import in_transit
from penstock.checks.app import check
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.settings import Platform
from penstock.worker import Done, Next, Task, Worker, WorkerSettings

COUNT = 10_000


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_transit, "SETTLE_S", 1.0)
    monkeypatch.setattr(in_transit, "SEARCH_EVERY_S", 0.2)


@pytest.fixture
async def system(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[System]:
    await make_topics(kafka_servers, prefix)
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        # With a limit, workers do not go on: each stage of a task passes task-sync.
        await types.register(pool, types.TaskType(name="t", partitions=2, max_in_flight=COUNT))
        yield System(kafka_servers, prefix, database, stack, pool)


@pytest.fixture
async def gateway(system: System, tmp_path: Path) -> AsyncIterator[Caller]:
    async with running_gateway(
        **system.where, postgres=system.database, objects=f"file://{tmp_path}"
    ) as caller:
        yield caller


class TwoStages:
    """A worker of two stages; the first stage waits for `may_end`."""

    def __init__(self, system: System) -> None:
        self.may_end = asyncio.Event()
        self.begun: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self.second: Counter[int] = Counter()
        self.worker = Worker(WorkerSettings(**system.where, objects="memory:///", pool=500, backlog=100))

        @self.worker.stage("t.start")
        async def start(task: Task) -> Next:
            self.begun[task.id] += 1
            await self.may_end.wait()
            self.ended[task.id] += 1
            return Next("end", None)

        @self.worker.stage("t.end")
        async def end(task: Task) -> Done:
            self.second[task.id] += 1
            return Done()


async def operate(gateway: Caller, verb: str) -> int:
    answer = await gateway.post("/operations", {"verb": verb, "filter": {"type": "t"}, "by": "ann"})
    assert answer.status == 201, answer.body

    async def ended() -> bool:
        return bool((await gateway.get(f"/operations/{answer.body['id']}")).body["state"] == "done")

    await wait_until(ended, what="the operation ends")
    changed: int = (await gateway.get(f"/operations/{answer.body['id']}")).body["changed"]
    return changed


async def test_ten_thousand_running_tasks_are_paused_and_resumed(system: System, gateway: Caller) -> None:
    """F5: a running task ends its stage and pauses before the next. A queued task does not run,
    although its record is on Kafka. After resume each stage of each task takes effect once, and
    `penstock check` is clean while all are paused."""
    await system.start("task-sync", "heartbeats", "stages")
    worker = TwoStages(system)
    await system.stack.enter_async_context(running_service(worker.worker.serve))
    submissions = [Submission(type="t", context=Context.encode(n)) for n in range(COUNT)]
    ids = [submission.id for submission in await tasks.submit(system.pool, submissions)]

    async def in_progress() -> bool:
        states = await system.states()
        return states.get("running", 0) >= 500 and states.get("queued", 0) > 0 and states.get("ready", 0) > 0

    await wait_until(in_progress)
    # The operation visits every task once, even while task-sync changes the tasks' states.
    assert await operate(gateway, "pause") == COUNT
    pausing = [row["id"] for row in await system.pool.fetch("SELECT id FROM task WHERE state = 'running'")]
    assert await system.pool.fetchval("SELECT bool_and(pausing) FROM task WHERE state = 'running'")
    assert set(await system.states()) == {"paused", "running"}
    body = (await gateway.get(f"/tasks/{pausing[0]}")).body
    assert (body["state"], body["pausing"]) == ("running", True)

    worker.may_end.set()
    await system.become(paused=COUNT)
    rows = await system.pool.fetch("SELECT id, stage, step FROM task")
    # Exactly the running tasks have completed their stage.
    assert {row["id"] for row in rows if row["stage"] == "end"} == set(pausing)
    assert not worker.second
    report = await check(Platform(**system.where, postgres=system.database))
    assert report.clean, report.to_wire()
    assert report.tasks == {"paused": COUNT}

    assert await operate(gateway, "resume") == COUNT
    await system.become(succeeded=COUNT)
    assert set(worker.ended) == set(worker.second) == set(ids)
    # No result is stale, so each second stage runs once.
    assert set(worker.second.values()) == {1}
    effects = await system.pool.fetch(
        "SELECT task_id, stage, count(*) AS n FROM attempt WHERE outcome IN ('next', 'done') GROUP BY 1, 2"
    )
    assert len(effects) == 2 * COUNT
    assert {row["n"] for row in effects} == {1}


async def test_a_record_of_a_paused_task_has_no_effect(system: System, gateway: Caller) -> None:
    """F5, W4: a worker that reads the record of a paused task receives a revocation, and completes
    no stage. After resume the task runs as another attempt."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.submit(20)
    await system.become(queued=20)
    # Wait until the records are on Kafka: a release that is not yet published has a row here.
    await wait_until(lambda: system.pool.fetchval("SELECT count(*) = 0 FROM release"))
    assert await operate(gateway, "pause") == 20
    worker = TwoStages(system)
    await system.stack.enter_async_context(running_service(worker.worker.serve))
    topic = f"{system.where['prefix']}revoked"

    async def revoked() -> bool:
        records = await read(system.where["kafka"], topic)
        over = {
            attempt_id[0] for record in records if record["why"] == "over" for attempt_id in record["tasks"]
        }
        return len(records) > 1 and len(over) == 20

    await wait_until(revoked, every=0.3, what="the worker receives the revocation")
    assert await system.states() == {"paused": 20}
    assert not worker.ended
    assert await operate(gateway, "resume") == 20
    worker.may_end.set()
    await system.become(succeeded=20)
    rows = await system.pool.fetch("SELECT DISTINCT attempt FROM attempt WHERE stage = 'start'")
    assert [row["attempt"] for row in rows] == [1]


async def test_a_delay_continues_while_a_task_is_paused(system: System, gateway: Caller) -> None:
    """F5: a delay ends at a fixed time. A task resumed before that time waits for it; a task
    resumed later is ready at once."""
    await system.start("task-sync")
    run_at = datetime.now(UTC) + timedelta(hours=1)
    submitted = await tasks.submit(
        system.pool, [Submission(type="t", context=Context.encode(n), run_at=run_at) for n in range(2)]
    )
    late, early = (submission.id for submission in submitted)
    assert await operate(gateway, "pause") == 2
    due = await system.pool.fetchval("SELECT due_at FROM task WHERE id = $1", late)
    await system.pool.execute("UPDATE task SET due_at = now() - interval '1 second' WHERE id = $1", early)
    assert await operate(gateway, "resume") == 2
    # Only the operation's notification makes task-sync look for ready tasks now.
    await system.become(scheduled=1, queued=1)
    row = await system.pool.fetchrow("SELECT id, due_at FROM task WHERE state = 'scheduled'")
    assert (row["id"], row["due_at"]) == (late, due) == (late, run_at)
