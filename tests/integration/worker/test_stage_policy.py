"""The policy of a stage on the real servers: back-off and concurrency, over Kafka and HTTP."""

import asyncio
from collections import Counter
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
from penstock.worker import Backoff, Done, Fail, Next, Worker, WorkerSettings


@pytest.fixture(params=[False, True], ids=["kafka", "http"])
async def system(request, kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        # An hour: no test waits for the back-off of the type.
        hour_ms = 3_600_000
        await types.register(
            pool, types.TaskType(name="t", partitions=2, retry_base_ms=hour_ms, retry_max_ms=hour_ms)
        )
        system = System(kafka_servers, prefix, database, stack, pool)
        await system.start("task-sync", "heartbeats", "stages")
        system.worker = {}
        if request.param:
            gateway = await stack.enter_async_context(
                running_gateway(**system.where, postgres=database, objects="memory:///")
            )
            await wait_until(gateway.is_ready)
            system.worker["worker_gateway"] = gateway.url
        yield system


def worker_of(system, **given):
    return Worker(WorkerSettings(**system.where, **system.worker, objects="memory:///", **given))


async def submit(system, *contexts):
    submissions = [Submission(type="t", context=Context.encode(each)) for each in contexts]
    return [found.id for found in await tasks.submit(system.pool, submissions)]


async def test_a_stage_has_its_own_back_off(system):
    """W1: its delays apply in place of the type's hour, also that of zero. The number of attempts
    is still that of the type."""
    worker = worker_of(system)

    @worker.stage("t.start", backoff=Backoff(base_s=0.1, factor=1, jitter=0))
    async def start(task):
        if task.attempt == 0:
            raise ConnectionError("not yet")
        return Next("second")

    @worker.stage("t.second", backoff=Backoff(base_s=0, max_s=0))
    def second(task):
        return Fail("never")

    @worker.stage("t.plain")
    def plain(task):
        return Fail("once")

    await submit(system, None)
    plain_id = (
        await tasks.submit(system.pool, [Submission(type="t", stage="plain", context=Context.encode(None))])
    )[0].id
    async with running_service(worker.serve):
        await system.become(failed=1, scheduled=1)
        failed = await system.pool.fetchrow("SELECT stage, failures FROM task WHERE state = 'failed'")
        assert tuple(failed) == ("second", 3)
        waits_s = await system.pool.fetchval(
            "SELECT extract(epoch FROM due_at - now()) FROM task WHERE id = $1", plain_id
        )
        assert waits_s > 1_000, "a stage without a policy has that of its type"


async def test_no_more_attempts_of_a_stage_run_at_once_than_it_allows(system):
    """W1: in one worker process; each task runs once and succeeds, and the other stage of the type
    is not delayed."""
    worker = worker_of(system)
    running, most, ran, quick = 0, 0, Counter(), asyncio.Event()

    @worker.stage("t.start", concurrency=3)
    async def start(task):
        nonlocal running, most
        running += 1
        most = max(most, running)
        ran[task.id] += 1
        await quick.wait()
        await asyncio.sleep(0.005)
        running -= 1
        return Done()

    @worker.stage("t.quick")
    async def is_quick(task):
        # Runs although the other stage is full of tasks that came first.
        quick.set()
        return Done()

    ids = await submit(system, *range(60))
    async with running_service(worker.serve):
        await wait_until(lambda: running == 3, what="the stage is full")
        await tasks.submit(system.pool, [Submission(type="t", stage="quick", context=Context.encode(None))])
        await system.become(succeeded=61)
    assert most == 3
    assert ran == dict.fromkeys(ids, 1)
    found = await system.pool.fetch("SELECT DISTINCT failures, losses FROM task")
    assert [tuple(row) for row in found] == [(0, 0)]


async def test_a_worker_of_limited_stages_takes_what_it_can_run(system):
    """W1: where every stage has a limit, tasks stay on the topic; few of them are handed back."""
    worker = worker_of(system)
    running, most = 0, 0

    @worker.stage("t.start", concurrency=2)
    async def start(task):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return Done()

    await submit(system, *range(40))
    async with running_service(worker.serve):
        await system.become(succeeded=40)
    assert most == 2
    # How many will soon have a slot is an estimate.
    assert await system.pool.fetchval("SELECT count(*) FROM attempt WHERE outcome = 'handed_back'") < 20
