"""A worker with three stages that only pass the context on, for benchmarks."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence

from penstock.worker import Done, Next, Task, Worker

logger = logging.getLogger("app")


def make_worker(log: str | None, types: Sequence[str], lines: int = 0) -> Worker:
    """Creates the worker.

    With `log` it writes a line per task there: the seconds from the context's `at` to the first
    stage. Each stage logs `lines` lines, to the task's log alone.
    """
    worker = Worker(task_logs="only") if lines else Worker()
    starts = open(log, "a", buffering=1) if log else None  # noqa: SIM115 (open as long as the process)

    def write() -> None:
        for number in range(lines):
            logger.info("line %d of the log, of the usual length for such a line of text", number)

    async def one(task: Task) -> Next:
        write()
        if starts:
            starts.write(f"{time.time() - task.context['at']}\n")
        return Next("two", task.context)

    async def two(task: Task) -> Next:
        write()
        return Next("three", task.context)

    async def three(task: Task) -> Done:
        write()
        return Done(task.context)

    for name in types:
        worker.stage(f"{name}.one")(one)
        worker.stage(f"{name}.two")(two)
        worker.stage(f"{name}.three")(three)
    return worker


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log")
    parser.add_argument("--lines", type=int, default=0, help="that each stage logs")
    parser.add_argument("types", nargs="+", help="task types")
    arguments = parser.parse_args()
    make_worker(arguments.log, arguments.types, arguments.lines).run()
