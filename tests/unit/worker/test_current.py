"""The current attempt: what code that a handler calls or starts knows."""

import asyncio
import contextvars
import threading

import pytest

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.objects import ObjectStore
from penstock.worker import Done, current_task
from penstock.worker.execution import Execution, Stage


def ready(id_):
    return ReadyTask(Fence(id_, 0, "s", 0), "t", Context.encode({}), lease_ms=60_000, tries=0)


async def run(handler, *ids):
    execution = Execution({("t", "s"): Stage(handler, 5.0, None)}, ObjectStore("memory:///"), 4)
    return await asyncio.gather(*(execution.run(ready(id_), pytest.fail) for id_ in ids))


async def test_code_of_an_async_handler_knows_its_task():
    """W1: each of two handlers that run at once, its tasks and its threads know their own task."""
    met = asyncio.Barrier(2)
    seen = {}

    async def handler(task):
        await met.wait()
        seen[task.id] = {
            current_task().id,
            (await asyncio.create_task(later())).id,
            (await asyncio.to_thread(current_task)).id,
        }
        return Done()

    async def later():
        await met.wait()
        return current_task()

    results = await run(handler, 1, 2)
    assert [result.error for result in results] == [None, None]
    assert seen == {1: {1}, 2: {2}}


async def test_a_sync_handler_knows_its_task():
    """W1: code on the thread of a synchronous handler, and on a thread to which the handler copies
    the context, knows the task."""
    seen = []

    def handler(task):
        seen.append(current_task() is task)
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: seen.append(context.run(current_task) is task))
        thread.start()
        thread.join()
        return Done()

    await run(handler, 1)
    assert seen == [True, True]


async def test_without_a_handler_there_is_no_task():
    """W1: before and after a handler there is no current task, and the error says what to do."""
    with pytest.raises(RuntimeError, match="no handler runs this code"):
        current_task()
    await run(lambda task: Done(), 1)
    with pytest.raises(RuntimeError, match="in_current_task"):
        current_task()
