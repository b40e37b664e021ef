"""A worker for fault tests: three stages that count, and a ledger file of their executions.

python -m tests.chaos.ledger_worker LEDGER

Each execution has a unique name. It writes the name to the ledger at its start and its end, and
adds it to the task's context. The result of a task names the executions that took effect; the
ledger names all.
"""

import asyncio
import os
import secrets
import signal
import sys
import time

from penstock.worker import Done, Fail, Next, Outcome, Task, Worker

# A small pool and some milliseconds of work: a fault finds running handlers and waiting claims.
worker = Worker(
    pool=int(os.environ.get("LEDGER_POOL", "8")), backlog=int(os.environ.get("LEDGER_BACKLOG", "50"))
)
WORK_S = 0.02
# Appending a short line is atomic: many workers can share the file, and a worker can be killed or
# paused at any moment. Faults of the servers do not affect the file.
ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def begin(task: Task) -> str:
    name = secrets.token_hex(8)
    context = task.context
    line = (
        f"begin {name} {task.id} {task.step} {task.attempt} {worker.id} {context['wave']} {context['key']} "
        f"{time.time():.3f}\n"
    )
    os.write(ledger, line.encode())
    if context.get("kills") == task.step:
        os.kill(os.getpid(), signal.SIGKILL)
    return name


def end(task: Task, name: str, following: str | None) -> Outcome:
    # Some tasks fail once, so that attempts are counted and delays run during faults.
    failing = task.context["fails"] == task.step and task.attempt == 0
    os.write(ledger, f"end {name} {'failed' if failing else 'well'} {time.time():.3f}\n".encode())
    if failing:
        return Fail("intended to fail once")
    context = {**task.context, "n": task.context["n"] + 1, "by": [*task.context["by"], name]}
    return Next(following, context) if following else Done(context)


@worker.stage("count.one")
async def one(task: Task) -> Outcome:
    name = begin(task)
    await asyncio.sleep(task.context.get("lasts_s", WORK_S))
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
