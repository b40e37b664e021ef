"""A worker for fault tests: three stages that count, each execution written to a ledger that outlives the worker.

python -m tests.chaos.ledger_worker LEDGER

Each execution has a name of its own, which it writes down when it begins and ends and adds to the task's context: so
the result of a task says which executions took effect, and the ledger which there were.
"""

import asyncio
import os
import secrets
import sys
import time

from penstock.worker import Done, Fail, Next, Outcome, Task, Worker

# Few at a time and some milliseconds each, so that a fault meets work under way and claims that wait.
worker = Worker(pool=8, backlog=50)
WORK_S = 0.02
# Appending a short line is atomic, so that any number of workers may share the file and die, or stand still, at any
# moment; and no fault of the servers reaches it.
ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def begin(task: Task) -> str:
    name = secrets.token_hex(8)
    line = f"begin {name} {task.id} {task.step} {task.attempt} {worker.id} {task.context['wave']}\n"
    os.write(ledger, line.encode())
    return name


def end(task: Task, name: str, following: str | None) -> Outcome:
    # Some tasks fail once of themselves, so that attempts are counted and delays run while faults last.
    failing = task.context["fails"] == task.step and task.attempt == 0
    os.write(ledger, f"end {name} {'failed' if failing else 'well'}\n".encode())
    if failing:
        return Fail("it was told to fail once")
    context = {**task.context, "n": task.context["n"] + 1, "by": [*task.context["by"], name]}
    return Next(following, context) if following else Done(context)


@worker.stage("count.one")
async def one(task: Task) -> Outcome:
    name = begin(task)
    await asyncio.sleep(WORK_S)
    return end(task, name, "two")


@worker.stage("count.two")
def two(task: Task) -> Outcome:
    name = begin(task)
    time.sleep(WORK_S)
    return end(task, name, "three")


@worker.stage("count.three")
async def three(task: Task) -> Outcome:
    name = begin(task)
    await asyncio.sleep(WORK_S)
    return end(task, name, None)


if __name__ == "__main__":
    worker.run()
