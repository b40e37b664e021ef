"""Pausing and resuming tasks while workers have them in hand, on the real Kafka and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.gateways import Caller, running_gateway
from tests.running import make_topics, read, running_service
from tests.system import System
from tests.waiting import wait_until

from penstock.checks import moving
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
    monkeypatch.setattr(moving, "SETTLE_S", 1.0)
    monkeypatch.setattr(moving, "LOOK_EVERY_S", 0.2)


@pytest.fixture
async def system(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[System]:
    await make_topics(kafka_servers, prefix)
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        yield System(kafka_servers, prefix, database, stack, pool)


@pytest.fixture
async def gateway(system: System, tmp_path: Path) -> AsyncIterator[Caller]:
    async with running_gateway(
        **system.where, postgres=system.database, objects=f"file://{tmp_path}"
    ) as caller:
        yield caller


class Two:
    """A worker of two stages; the first of them ends when it may."""

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


async def test_ten_thousand_are_paused_and_resumed_under_workers(system: System, gateway: Caller) -> None:
    """F5: what runs ends its stage and stands still before the next; what is queued does not run, though its record is on
    Kafka; resumed, each stage of each task takes effect once. `penstock check` finds nothing amiss in between."""
    await system.start("task-sync", "heartbeats", "stages")
    two = Two(system)
    await system.stack.enter_async_context(running_service(two.worker.serve))
    wanted = [Submission(type="t", context=Context.encode(n)) for n in range(COUNT)]
    ids = [one.id for one in await tasks.submit(system.pool, wanted)]

    async def under_way() -> bool:
        states = await system.states()
        return states.get("running", 0) >= 500 and states.get("queued", 0) > 0 and states.get("ready", 0) > 0

    await wait_until(under_way, timeout=60)
    # Whatever the gate does meanwhile: the walk meets every task once, in whichever state it is.
    assert await operate(gateway, "pause") == COUNT
    marked = [row["id"] for row in await system.pool.fetch("SELECT id FROM task WHERE state = 'running'")]
    assert await system.pool.fetchval("SELECT bool_and(pausing) FROM task WHERE state = 'running'")
    assert set(await system.states()) == {"paused", "running"}
    shown = (await gateway.get(f"/tasks/{marked[0]}")).body
    assert (shown["state"], shown["pausing"]) == ("running", True)

    two.may_end.set()
    await system.become(paused=COUNT)
    rows = await system.pool.fetch("SELECT id, stage, step FROM task")
    # Those that ran have done their stage, and none but those.
    assert {row["id"] for row in rows if row["stage"] == "end"} == set(marked)
    assert not two.second
    report = await check(Platform(**system.where, postgres=system.database))
    assert report.clean, report.to_wire()
    assert report.tasks == {"paused": COUNT}

    assert await operate(gateway, "resume") == COUNT
    await system.become(succeeded=COUNT)
    assert set(two.ended) == set(two.second) == set(ids)
    # Its result was never in doubt, so no second stage ran twice.
    assert set(two.second.values()) == {1}
    effects = await system.pool.fetch(
        "SELECT task_id, stage, count(*) AS n FROM attempt WHERE outcome IN ('next', 'done') GROUP BY 1, 2"
    )
    assert len(effects) == 2 * COUNT
    assert {row["n"] for row in effects} == {1}


async def test_a_record_of_a_paused_task_runs_nothing_that_counts(system: System, gateway: Caller) -> None:
    """F5, W4: queued when it was paused, its record is read by a worker that comes later; nothing comes of it, and the
    worker is told that the attempt is over. Resumed, the task runs as another attempt."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.submit(20)
    await system.become(queued=20)
    # With their records on Kafka, not only on their way there.
    await wait_until(lambda: system.pool.fetchval("SELECT count(*) = 0 FROM release"))
    assert await operate(gateway, "pause") == 20
    two = Two(system)
    await system.stack.enter_async_context(running_service(two.worker.serve))
    topic = f"{system.where['prefix']}revoked"

    async def told() -> bool:
        records = await read(system.where["kafka"], topic)
        over = {key[0] for record in records if record["why"] == "over" for key in record["tasks"]}
        return len(records) > 1 and len(over) == 20

    await wait_until(told, timeout=60, every=0.3, what="the worker is told")
    assert await system.states() == {"paused": 20}
    assert not two.ended
    assert await operate(gateway, "resume") == 20
    two.may_end.set()
    await system.become(succeeded=20)
    rows = await system.pool.fetch("SELECT DISTINCT attempt FROM attempt WHERE stage = 'start'")
    assert [row["attempt"] for row in rows] == [1]


async def test_a_delay_goes_on_while_a_task_is_paused(system: System, gateway: Caller) -> None:
    """F5: a delay is a moment, not a length of time: what is resumed before it waits for it, what is resumed after it
    is ready at once."""
    await system.start("task-sync")
    run_at = datetime.now(UTC) + timedelta(hours=1)
    submitted = await tasks.submit(
        system.pool, [Submission(type="t", context=Context.encode(n), run_at=run_at) for n in range(2)]
    )
    late, early = (one.id for one in submitted)
    assert await operate(gateway, "pause") == 2
    due = await system.pool.fetchval("SELECT due_at FROM task WHERE id = $1", late)
    await system.pool.execute("UPDATE task SET due_at = now() - interval '1 second' WHERE id = $1", early)
    assert await operate(gateway, "resume") == 2
    # The gate hears of it: nothing else would make it look now.
    await system.become(scheduled=1, queued=1)
    row = await system.pool.fetchrow("SELECT id, due_at FROM task WHERE state = 'scheduled'")
    assert (row["id"], row["due_at"]) == (late, due) == (late, run_at)
