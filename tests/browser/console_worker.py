"""A worker whose tasks have every state that the console shows.

python -m tests.browser.console_worker
"""

import asyncio
import logging

from penstock.worker import Done, Fail, Next, Task, Worker

worker = Worker(pool=16)
log = logging.getLogger("media")


@worker.stage("media.probe")
async def probe(task: Task) -> Next:
    log.info("Probing %s", task.context["file"])
    return Next("encode", {**task.context, "frames": 2400})


@worker.stage("media.encode")
async def encode(task: Task) -> Done:
    log.info("Encoding %d frames", task.context["frames"])
    task.progress(1.0, "encoded")
    return Done({"file": task.context["file"], "bytes": 1_048_576})


@worker.stage("flaky.start")
async def flaky(task: Task) -> Done | Fail:
    if task.attempt < 2:
        log.warning("The remote side closed the connection")
        return Fail("the remote side closed the connection")
    return Done({"attempts": task.attempt + 1})


@worker.stage("broken.start")
async def broken(task: Task) -> Done:
    raise ValueError(f"no decoder for {task.context['file']}")


@worker.stage("endless.start")
async def endless(task: Task) -> Done:
    """Runs until it is cancelled, and tells how far it is."""
    part = 0
    while True:
        part += 1
        log.info("Part %d is done", part)
        task.progress(min(0.9, part / 100), f"part {part}")
        await asyncio.sleep(1)


@worker.stage("item.start")
async def item(task: Task) -> Done | Fail:
    if task.context["item"] % 25 == 7:
        return Fail("the item has no data", permanent=True)
    return Done(task.context["item"] * 2)


if __name__ == "__main__":
    worker.run()
