"""A worker whose handlers log in the ways that `benchmarks.logs` measures.

    python -m benchmarks.log_worker

The context of a task has the numbers that its handler needs. Each type has one stage, `run`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from penstock.worker import Done, Task, Worker

TYPES = ("burst", "paced", "stamped", "timed", "noisy")
ROUND_S = 0.01

log = logging.getLogger("app")
worker = Worker()


@worker.stage("burst.run")
def burst(task: Task) -> Done:
    """Logs `lines` lines of `bytes` bytes as fast as it can."""
    text = "x" * (task.context["bytes"] - 20)
    began_s = time.time()
    for number in range(task.context["lines"]):
        log.info("line %08d of it %s", number, text)
    return Done({"began_s": began_s, "logged_s": time.time()})


@worker.stage("paced.run")
async def paced(task: Task) -> Done:
    """Logs `rate` lines a second for `seconds`."""
    begin_s, lines = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - begin_s) < task.context["seconds"]:
        while lines < elapsed_s * task.context["rate"]:
            log.info("line %d of the log, of the usual length for such a line of text", lines)
            lines += 1
        await asyncio.sleep(ROUND_S)
    return Done(lines)


@worker.stage("stamped.run")
async def stamped(task: Task) -> Done:
    """Prints the time `lines` times, each `every_s` seconds after the one before."""
    for _ in range(task.context["lines"]):
        print(time.time())
        await asyncio.sleep(task.context["every_s"])
    return Done()


@worker.stage("timed.run")
def timed(task: Task) -> Done:
    """Logs until the file `until` exists; writes to `file` when each call was, and its seconds."""
    found: list[str] = []
    while not Path(task.context["until"]).exists():
        for _ in range(5):
            before_s = time.perf_counter()
            log.info("line %d of the log, of the usual length for such a line of text", len(found))
            found.append(f"{time.time()} {time.perf_counter() - before_s}\n")
        time.sleep(ROUND_S)
    Path(task.context["file"]).write_text("".join(found))
    return Done()


@worker.stage("noisy.run")
def noisy(task: Task) -> Done:
    """Logs lines of `bytes` bytes for `seconds`, as fast as it can."""
    text, until_s, lines = "x" * task.context["bytes"], time.perf_counter() + task.context["seconds"], 0
    while time.perf_counter() < until_s:
        log.info("%s", text)
        lines += 1
    return Done(lines)


if __name__ == "__main__":
    worker.run()
