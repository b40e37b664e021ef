"""A worker whose one stage passes the context on, for the benchmark of flows."""

from __future__ import annotations

import asyncio
import sys

from penstock.worker import Done, Next, Task, Worker


def make_worker() -> Worker:
    """Creates the worker of the types `step`, with one stage, and `stages`, with three.

    A context that is a fraction is the number of seconds that its task takes.
    """
    worker = Worker()

    @worker.stage("step.one")
    async def step(task: Task) -> Done:
        if isinstance(task.context, float):
            await asyncio.sleep(task.context)
        return Done(task.context)

    async def following(task: Task) -> Next:
        return Next({"one": "two", "two": "three"}[task.stage], task.context)

    worker.stage("stages.one")(following)
    worker.stage("stages.two")(following)
    worker.stage("stages.three")(step)
    return worker


if __name__ == "__main__":
    sys.exit(make_worker().run())
