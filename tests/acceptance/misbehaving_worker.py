"""Handlers that misbehave, each in its own way."""

import asyncio
import time

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
