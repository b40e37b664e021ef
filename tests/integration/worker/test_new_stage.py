"""A rolling upgrade that adds a stage: workers with and without its handler read one topic."""

from contextlib import AsyncExitStack

import pytest
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.worker import Done, Next, Worker, WorkerSettings

TASKS = 30


def make_worker(system, upgraded, **where):
    worker = Worker(WorkerSettings(**system.where, objects="memory:///", **where))

    @worker.stage("t.start")
    async def start(_task):
        return Next("added")

    if upgraded:

        @worker.stage("t.added")
        async def added(task):
            return Done(task.tries)

    return worker


@pytest.mark.parametrize("over_http", [False, True], ids=["kafka", "http"])
async def test_a_rolling_upgrade_that_adds_a_stage_fails_no_task(
    kafka_servers, prefix, database, over_http, caplog
):
    """O6: a worker that lacks the handler hands an attempt back, uncounted, until a worker that has
    it takes the task. The log has the stage once for each such worker."""
    await make_topics(kafka_servers, prefix)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=2, max_attempts=1))
        system = System(kafka_servers, prefix, database, stack, pool)
        await system.start("task-sync", "heartbeats", "stages")
        where = {}
        if over_http:
            gateway = await stack.enter_async_context(
                running_gateway(**system.where, postgres=database, objects="memory:///")
            )
            await wait_until(gateway.is_ready)
            where["worker_gateway"] = gateway.url
        old = await stack.enter_async_context(AsyncExitStack())
        await old.enter_async_context(running_service(make_worker(system, upgraded=False, **where).serve))
        submissions = [Submission(type="t", context=Context.encode(n)) for n in range(TASKS)]
        await tasks.submit(pool, submissions)
        handed_back = "SELECT count(DISTINCT task_id) FROM attempt WHERE outcome = 'handed_back'"

        async def all_handed_back():
            return await pool.fetchval(handed_back) == TASKS

        await wait_until(all_handed_back, what="the old worker has handed each task back")
        await stack.enter_async_context(running_service(make_worker(system, upgraded=True, **where).serve))

        async def ended(count):
            return await pool.fetchval("SELECT count(*) FROM task WHERE finished_at IS NOT NULL") >= count

        await wait_until(lambda: ended(TASKS // 3), what="tasks have reached the upgraded worker")
        await old.aclose()
        await wait_until(lambda: ended(TASKS), what="each task has ended")
        found = await pool.fetch("SELECT state, failures, losses FROM task")
        assert {tuple(row) for row in found} == {("succeeded", 0, 0)}
    logged = [record for record in caplog.records if getattr(record, "event", "") == "handler_missing"]
    assert [(record.task_type, record.stage) for record in logged] == [("t", "added")]
