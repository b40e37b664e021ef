"""A worker whose process is killed by some of its tasks."""

import asyncio
import ctypes
import os
import signal
import sys

from penstock.worker import Done, Task, Worker

worker = Worker()


def kill(way: str) -> None:
    """Ends this process at once, as a crash, a segmentation fault or the OOM killer does."""
    if way == "exit":
        os._exit(17)
    if way == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)


@worker.stage("risky.quick")
async def quick(_task: Task) -> Done:
    return Done()


@worker.stage("risky.start")
async def start(task: Task) -> Done:
    if task.context == "swift":
        kill("kill")
    # Long enough that all tasks of a poll run together.
    await asyncio.sleep(0.2)
    if task.context:
        kill(task.context)
    return Done()


if __name__ == "__main__":
    # Without a dump of 50 stacks.
    sys.stderr.flush()
    worker.run()
