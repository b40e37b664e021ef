"""A worker for fault tests: three stages that count, each execution written to a ledger that outlives the worker.

python -m tests.chaos.ledger_worker LEDGER
"""

import asyncio
import os
import sys
import time

from penstock.worker import Done, Next, Task, Worker

# Few at a time and some milliseconds each, so that a kill meets work under way and claims that wait.
worker = Worker(pool=8, backlog=50)
WORK_S = 0.02
# Appending a short line is atomic, so that any number of workers may share the file and die at any moment.
ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(task: Task) -> dict:
    os.write(ledger, f"{task.id} {task.step} {task.attempt}\n".encode())
    return {**task.context, "n": task.context["n"] + 1}


@worker.stage("count.one")
async def one(task: Task) -> Next:
    await asyncio.sleep(WORK_S)
    return Next("two", note(task))


@worker.stage("count.two")
def two(task: Task) -> Next:
    time.sleep(WORK_S)
    return Next("three", note(task))


@worker.stage("count.three")
async def three(task: Task) -> Done:
    await asyncio.sleep(WORK_S)
    return Done(note(task))


if __name__ == "__main__":
    worker.run()
