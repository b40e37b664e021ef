"""Whose turn it is in a worker: by priority, and in order of arrival within one."""

from __future__ import annotations

import asyncio

import orjson
from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.core.task import Priority
from penstock.worker.app import Pool
from penstock.worker.execution import Execution, Stage
from penstock.worker.hand import key_of
from penstock.worker.outcomes import Done
from penstock.worker.turns import Backlog, Places

PRIORITIES = st.sampled_from(list(Priority))


def ready(number, priority=Priority.MEDIUM, stage="s"):
    return ReadyTask(Fence(number, 0, stage, 0), "t", Context.encode(None), 60_000, priority=priority)


def test_a_record_carries_its_priority_and_an_old_one_is_medium():
    """S3: what task-sync wrote before there was a priority, or may write one day, is taken for MEDIUM."""
    for priority in Priority:
        assert ReadyTask.decode(ready(1, priority).encode()).priority is priority
    old = ready(1).to_wire()
    del old["priority"]
    assert ReadyTask.decode(orjson.dumps(old)).priority is Priority.MEDIUM
    assert ReadyTask.decode(orjson.dumps({**old, "priority": "LATER"})).priority is Priority.MEDIUM


@given(st.lists(st.one_of(PRIORITIES, st.sampled_from(["take", "drop"])), max_size=100))
def test_the_backlog_goes_by_priority_then_arrival(steps):
    """S3: whatever came and went before, the next is the first of the most urgent that wait."""
    backlog, model = Backlog(), []
    for number, step in enumerate(steps):
        if step == "take":
            if model:
                expected = min(model, key=lambda one: (one.priority, one.fence.id))
                model.remove(expected)
                assert backlog.take() == expected
        elif step == "drop":
            gone = {key_of(one) for one in model[::2]}
            model = model[1::2]
            backlog.drop(gone)
        else:
            backlog.add(ready(number, step))
            model.append(ready(number, step))
        assert len(backlog) == len(model)


async def test_handlers_begin_the_most_urgent_first():
    """S3: with every place taken, what came last and is most urgent begins first; async and synchronous handlers alike."""
    for is_async, pool_size, threads in ((True, 1, 1), (False, 100, 1)):
        begun, over = [], asyncio.Event()
        loop, free = asyncio.get_running_loop(), asyncio.Event()

        async def begin(task, begun=begun, free=free):
            begun.append(task.id)
            await free.wait()
            return Done()

        def block(task, begun=begun, free=free, loop=loop):
            begun.append(task.id)
            asyncio.run_coroutine_threadsafe(free.wait(), loop).result()
            return Done()

        results = []

        def report(result, results=results, over=over):
            results.append(result)
            if len(results) == 6:
                over.set()

        stages = {("t", "s"): Stage(begin if is_async else block, 60, None)}
        pool = Pool(Execution(stages, None, threads), report, pool_size)
        pool.start_all([ready(1, Priority.LOWEST)])
        while not begun:  # noqa: ASYNC110 (a thread's beginning has no event of this loop)
            await asyncio.sleep(0)
        pool.start_all([ready(2, Priority.LOWEST), ready(3), ready(4, Priority.LOWEST)])
        pool.start_all([ready(5, Priority.HIGHEST), ready(6)])
        await asyncio.sleep(0)
        free.set()
        await asyncio.wait_for(over.wait(), 30)
        assert begun == [1, 5, 3, 6, 2, 4]


@given(
    st.lists(st.tuples(PRIORITIES, st.sampled_from(["stays", "leaves", "cancelled"])), max_size=30),
    st.integers(1, 3),
)
def test_a_place_is_never_lost_nor_given_twice(comers, count):
    """S3: whoever is cancelled while waiting, or just as its turn comes, leaves the places as they were."""

    async def scenario():
        places, inside, most = Places(count), 0, 0

        async def come(priority, stay):
            nonlocal inside, most
            async with places.place(priority):
                inside += 1
                most = max(most, inside)
                try:
                    await (stay.wait() if stay else asyncio.sleep(0))
                finally:
                    inside -= 1

        leave, tasks = asyncio.Event(), []
        for priority, fate in comers:
            task = asyncio.create_task(come(priority, leave if fate == "stays" else None))
            tasks.append(task)
            await asyncio.sleep(0)
            if fate == "cancelled":
                task.cancel()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= count
        for _ in range(count):
            await asyncio.wait_for(places.place(Priority.LOWEST).__aenter__(), 1)

    asyncio.run(scenario())
