"""Penstock's worker, with its default settings."""

from __future__ import annotations

from benchmarks.peers import job
from penstock.worker import Done, Next, Task, Worker

TYPE = "noop"


def make_worker() -> Worker:
    """Creates the worker."""
    worker = Worker()

    @worker.stage(f"{TYPE}.one")
    async def one(task: Task) -> Next:
        job.started(task.context)
        await job.work_async()
        return Next("two", task.context)

    @worker.stage(f"{TYPE}.two")
    async def two(task: Task) -> Next:
        await job.work_async()
        return Next("three", task.context)

    @worker.stage(f"{TYPE}.three")
    async def three(task: Task) -> Done:
        await job.work_async()
        job.ended(task.context)
        return Done(task.context)

    return worker


if __name__ == "__main__":
    make_worker().run()
