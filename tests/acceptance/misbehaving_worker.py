"""Handlers that misbehave, each in a different way."""

import asyncio
import sys
import time
from contextlib import suppress

from penstock.worker import Done, Next, Task, Worker

worker = Worker()


@worker.stage("bad.raises")
async def raises(task: Task) -> Done:
    raise LookupError(f"there is no {task.context['thing']}")


@worker.stage("bad.nonsense")
async def nonsense(task: Task):
    return {"stage": "next, perhaps"}


@worker.stage("bad.hangs", timeout_s=0.3)
async def hangs(task: Task) -> Done:
    await asyncio.Event().wait()
    return Done()


@worker.stage("bad.hangs-on-a-thread", timeout_s=0.3)
def hangs_on_a_thread(task: Task) -> Done:
    time.sleep(60)
    return Done()


@worker.stage("bad.swallows", timeout_s=0.3)
async def swallows(task: Task) -> Done:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


@worker.stage("bad.exits")
async def exits(task: Task) -> Done:
    sys.exit(3)


@worker.stage("bad.exits-in-a-group")
async def exits_in_a_group(task: Task) -> Done:
    async with asyncio.TaskGroup() as group:
        group.create_task(call_exit())
    return Done()


async def call_exit() -> None:
    sys.exit(0)


@worker.stage("bad.exits-in-a-callback", timeout_s=0.3)
async def exits_in_a_callback(task: Task) -> Done:
    asyncio.get_running_loop().call_soon(sys.exit, 0)
    await asyncio.Event().wait()
    return Done()


@worker.stage("bad.exits-on-a-thread")
def exits_on_a_thread(task: Task) -> Done:
    sys.exit(3)


@worker.stage("bad.stops-iterating")
def stops_iterating(task: Task) -> Done:
    return Done(next(iter([])))


@worker.stage("bad.unprintable")
async def unprintable(task: Task) -> Done:
    raise OSError("no such file: \udcff.mp4")


@worker.stage("bad.recovers")
async def recovers(task: Task) -> Next:
    if task.tries < 1:
        raise RuntimeError("not yet")
    return Next("large", {"text": "x" * 10_000})


@worker.stage("bad.large")
async def large(task: Task) -> Done:
    return Done({"letters": len(task.context["text"])})


if __name__ == "__main__":
    worker.run()
