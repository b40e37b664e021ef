"""Each attempt begins in a clean copy of the worker's own context."""

import asyncio
import threading
from contextlib import suppress
from contextvars import ContextVar, copy_context

import pytest
from tests.support.waiting import wait_until
from tests.support.worker_platform import RecordingPlatform

from penstock.concurrency.batcher import Batcher
from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.core.suspects import Isolation
from penstock.worker import Done, Worker
from penstock.worker.execution import Execution
from penstock.worker.handler_pool import HandlerPool
from penstock.worker.loop_thread import loop_thread

tenant = ContextVar("tenant", default="nobody")
TASKS = 6


async def succeed(_task):
    return Done()


async def fail(_task):
    raise LookupError


async def cancel_itself(_task):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def hang(_task):
    await asyncio.Event().wait()


async def swallow_its_cancellation(_task):
    while True:
        with suppress(asyncio.CancelledError):
            await abandoned.get().wait()
            return Done()


def succeed_on_a_thread(_task):
    return Done()


abandoned = ContextVar("abandoned")


@pytest.mark.parametrize("isolation", [None, Isolation.ALONE], ids=["common", "suspects"])
@pytest.mark.parametrize(
    "end",
    [succeed, fail, cancel_itself, hang, swallow_its_cancellation, succeed_on_a_thread],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("where", ["handler", "middleware", "provider"])
async def test_what_an_attempt_sets_is_seen_by_no_other(end, isolation, where):
    """W1: the next attempt begins when one ends, and must not have the value of another tenant.
    All see what a function of the start has set."""
    worker, seen, released = Worker(worker_gateway="http://gateway.example"), [], asyncio.Event()
    abandoned.set(released)

    def enter(task):
        seen.append(tenant.get())
        tenant.set(f"tenant {task.id}")

    if where == "middleware":

        @worker.middleware
        async def around(task, call_next):
            enter(task)
            return await call_next(task)

    @worker.provide
    async def session(task):
        if where == "provider":
            enter(task)
        yield

    async def handler(task, session):
        if where == "handler":
            enter(task)
        return await end(task)

    def synchronous(task, session):
        if where == "handler":
            enter(task)
        return end(task)

    chosen = synchronous if end is succeed_on_a_thread else handler
    worker.stage("t.s", timeout_s=0.001 if end in (hang, swallow_its_cancellation) else 60)(chosen)
    worker.on_start(lambda: tenant.set("everyone"))
    results = []
    async with worker._lifecycle.running():
        runs = Execution(worker._stages, None, 1, around=worker._around, abandon_s=0.0)
        platform = RecordingPlatform(results.append)
        pool = HandlerPool(runs, platform, 1)
        platform.announce, platform.ended = pool.begin, pool.end_turn
        # As from the platform, whose context is another one.
        copy_context().run(
            pool.start_all,
            [
                ReadyTask(Fence(n, 0, "s", 0), "t", Context.encode(None), 60_000, isolation=isolation)
                for n in range(TASKS)
            ],
        )
        await wait_until(lambda: len(results) == TASKS, every=0)
        released.set()
        await pool.drain(60)
    assert seen == ["everyone"] * TASKS


async def test_calls_of_handlers_reach_the_platform_without_their_context():
    """W1: a task that begins there outlives the attempt, and serves others."""
    seen, called = [], threading.Event()

    def note():
        seen.append(tenant.get())
        called.set()

    async with loop_thread("platform") as platform:
        tenant.set("a tenant")
        platform.call_soon(note)
        await asyncio.to_thread(called.wait, 60)
    assert seen == ["nobody"]


async def test_a_batch_is_written_outside_the_context_of_its_first_item():
    """O2: a gateway's writer belongs to no trace and no reader of one request."""
    seen = []

    async def write(_items):
        seen.append(tenant.get())

    batcher = Batcher(write)
    tenant.set("a tenant")
    batcher.add(1)
    await batcher.wait_idle()
    assert seen == ["nobody"]
