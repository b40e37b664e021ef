"""A worker whose process is killed by some of its tasks."""

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path

from penstock.client import Client
from penstock.worker import Done, Task, Worker
from tests.support.waiting import wait_until

worker = Worker()


def kill(way: str) -> None:
    """Ends this process at once, as a crash, a segmentation fault or the OOM killer does."""
    if way == "exit":
        os._exit(17)
    if way == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)


def charge(task: Task) -> None:
    """Calls the payment service of the test, whose file has each call: key and attempt."""
    with Path(os.environ["CHARGES"]).open("a") as calls:
        calls.write(f"{task.token} {task.attempt_id}\n")


async def logged(client: Client, task: Task) -> bool:
    """Whether the platform has the lines of this attempt."""
    return any([line async for line in client.log_lines(task.id, task.step, task.attempt)])


@worker.stage("risky.quick")
async def quick(_task: Task) -> Done:
    return Done()


@worker.stage("risky.start")
async def start(task: Task) -> Done:
    if task.context == "swift":
        kill("kill")
    if task.context == "logged":
        charge(task)
        print(f"attempt {task.attempt} loads the file")
        async with Client() as client:
            await wait_until(lambda: logged(client, task))
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
