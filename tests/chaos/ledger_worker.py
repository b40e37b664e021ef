"""A worker for fault tests: three stages that count, and a ledger file of their executions.

python -m tests.chaos.ledger_worker LEDGER

LEDGER_TYPE is the type of its tasks (default: `count`).

Each execution has a unique name. It writes the name to the ledger at its start and its end, and
adds it to the task's context. The result of a task names the executions that took effect; the
ledger names all.

With `lines` in its context, a task logs as many numbered lines in its first two stages. The file
LEDGER.lines has each line before it is logged.
"""

import asyncio
import logging
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
TYPE = os.environ.get("LEDGER_TYPE", "count")
# Appending a short line is atomic: many workers can share the file, and a worker can be killed or
# paused at any moment. Faults of the servers do not affect the file.
ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


lines = os.open(f"{sys.argv[1]}.lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
log = logging.getLogger("ledger")
EACH_S = 0.005


def log_line(name: str, number: int) -> None:
    os.write(lines, f"{name} {number} {time.time():.4f}\n".encode())
    log.info("%s %d", name, number)


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
    if following:
        return Next(following, context)
    # The ledger is compared with results in PostgreSQL: they must be small.
    return Done({name: value for name, value in context.items() if name != "padding"})


@worker.stage(f"{TYPE}.one")
async def one(task: Task) -> Outcome:
    name = begin(task)
    for number in range(task.context.get("lines", 0)):
        log_line(name, number)
        await asyncio.sleep(EACH_S)
    await asyncio.sleep(task.context.get("lasts_s", WORK_S))
    return end(task, name, "two")


@worker.stage(f"{TYPE}.two")
def two(task: Task) -> Outcome:
    name = begin(task)
    for number in range(task.context.get("lines", 0)):
        if task.cancelled:
            # The worker has abandoned this thread, and its log has ended.
            break
        log_line(name, number)
        time.sleep(EACH_S)
    time.sleep(WORK_S)
    return end(task, name, "three")


@worker.stage(f"{TYPE}.three")
async def three(task: Task) -> Outcome:
    name = begin(task)
    await asyncio.sleep(WORK_S)
    return end(task, name, None)


if __name__ == "__main__":
    worker.run()
