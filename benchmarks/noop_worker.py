"""A worker whose three stages do nothing but hand the context on: the load of throughput and latency."""

from __future__ import annotations

import argparse
import time

from penstock.worker import Done, Next, Task, Worker


def make_worker(log: str | None) -> Worker:
    """The worker; with `log`, the delay from the context's `at` to the first stage goes there, a line a task."""
    worker = Worker()
    starts = open(log, "w", buffering=1) if log else None  # noqa: SIM115 (open as long as the process)

    @worker.stage("noop.one")
    async def one(task: Task) -> Next:
        if starts:
            starts.write(f"{time.time() - task.context['at']}\n")
        return Next("two", task.context)

    @worker.stage("noop.two")
    async def two(task: Task) -> Next:
        return Next("three", task.context)

    @worker.stage("noop.three")
    async def three(task: Task) -> Done:
        return Done(task.context)

    return worker


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log")
    make_worker(parser.parse_args().log).run()
