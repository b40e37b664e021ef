"""Order of handlers in a worker: by priority, then by arrival."""

from __future__ import annotations

import asyncio

import orjson
from hypothesis import given
from hypothesis import strategies as st
from tests.support.waiting import in_time
from tests.support.worker_platform import RecordingPlatform

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.core.task import Priority
from penstock.worker.execution import Execution, Stage
from penstock.worker.handler_pool import HandlerPool
from penstock.worker.outcomes import Done
from penstock.worker.priority_semaphore import PriorityQueue, PrioritySemaphore

PRIORITIES = st.sampled_from(list(Priority))


def ready(number, priority=Priority.MEDIUM, stage="s"):
    return ReadyTask(Fence(number, 0, stage, 0), "t", Context.encode(None), 60_000, priority=priority)


def test_a_record_has_its_priority_and_an_old_one_is_medium():
    """S3: records without priority, or with an unknown one, are MEDIUM."""
    for priority in Priority:
        assert ReadyTask.decode(ready(1, priority).encode()).priority is priority
    old = ready(1).to_wire()
    del old["priority"]
    assert ReadyTask.decode(orjson.dumps(old)).priority is Priority.MEDIUM
    assert ReadyTask.decode(orjson.dumps({**old, "priority": "LATER"})).priority is Priority.MEDIUM


@given(st.lists(st.one_of(PRIORITIES, st.sampled_from(["take", "drop"])), max_size=100))
def test_the_backlog_is_ordered_by_priority_then_arrival(steps):
    """S3: the next attempt is always the first one of the most urgent priority."""
    backlog, model = PriorityQueue(), []
    for number, step in enumerate(steps):
        if step == "take":
            if model:
                expected = min(model, key=lambda one: (one.priority, one.fence.id))
                model.remove(expected)
                assert backlog.take() == expected
        elif step == "drop":
            dropped = {one.fence.attempt_id for one in model[::2]}
            model = model[1::2]
            backlog.drop(dropped)
        else:
            backlog.add(ready(number, step))
            model.append(ready(number, step))
        assert len(backlog) == len(model)


async def test_the_most_urgent_handler_starts_first():
    """S3: while all permits are taken, the most urgent attempt starts next, also if it arrived
    last."""
    for is_async, pool_size, threads in ((True, 1, 1), (False, 100, 1)):
        started, over = [], asyncio.Event()
        loop, free = asyncio.get_running_loop(), asyncio.Event()

        async def begin(task, started=started, free=free):
            started.append(task.id)
            await free.wait()
            return Done()

        def block(task, started=started, free=free, loop=loop):
            started.append(task.id)
            asyncio.run_coroutine_threadsafe(free.wait(), loop).result()
            return Done()

        results = []

        def report(result, results=results, over=over):
            results.append(result)
            if len(results) == 6:
                over.set()

        stages = {("t", "s"): Stage(begin if is_async else block, 60, None)}
        pool = HandlerPool(Execution(stages, None, threads), RecordingPlatform(report), pool_size)
        pool.start_all([ready(1, Priority.LOWEST)])
        while not started:  # noqa: ASYNC110 (the start of a thread has no event in this loop)
            await asyncio.sleep(0)
        pool.start_all([ready(2, Priority.LOWEST), ready(3), ready(4, Priority.LOWEST)])
        pool.start_all([ready(5, Priority.HIGHEST), ready(6)])
        await asyncio.sleep(0)
        free.set()
        await in_time(over.wait())
        assert started == [1, 5, 3, 6, 2, 4]


@given(
    st.lists(st.tuples(PRIORITIES, st.sampled_from(["stays", "leaves", "cancelled"])), max_size=30),
    st.integers(1, 3),
)
def test_no_permit_is_lost_or_granted_twice(waiters, count):
    """S3: a cancelled waiter does not change the number of permits, also if cancelled when it gets
    its permit."""

    async def scenario():
        permits, inside, max_inside = PrioritySemaphore(count), 0, 0

        async def enter(priority, stay):
            nonlocal inside, max_inside
            async with permits.permit(priority):
                inside += 1
                max_inside = max(max_inside, inside)
                try:
                    await (stay.wait() if stay else asyncio.sleep(0))
                finally:
                    inside -= 1

        leave, tasks = asyncio.Event(), []
        for priority, ending in waiters:
            task = asyncio.create_task(enter(priority, leave if ending == "stays" else None))
            tasks.append(task)
            await asyncio.sleep(0)
            if ending == "cancelled":
                task.cancel()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert max_inside <= count
        for _ in range(count):
            await in_time(permits.permit(Priority.LOWEST).__aenter__(), 10)

    asyncio.run(scenario())


async def test_cancelled_waiters_leave_nothing_behind():
    """H11: revoked attempts that waited for a thread do not stay until the handlers before them
    end."""
    permits = PrioritySemaphore(1)
    async with permits.permit(Priority.MEDIUM):
        waiting = asyncio.create_task(permits.permit(Priority.LOW).__aenter__())
        for _ in range(1_000):
            cancelled = asyncio.create_task(permits.permit(Priority.HIGH).__aenter__())
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait({cancelled})
        assert len(permits._waiters) <= 2
    await in_time(waiting)
