"""A worker whose one stage passes the context on, for the benchmark of flows."""

from __future__ import annotations

import asyncio
import sys

from penstock.worker import Child, Done, Next, Spawn, Task, Worker


def make_worker() -> Worker:
    """Creates the worker of the types `step`, with one stage, `stages`, with three, and `spawn`.

    A context of `step` that is a fraction is the number of seconds that its task takes. The context
    of `spawn` is the number of its children.
    """
    worker = Worker()

    @worker.stage("step.one")
    async def step(task: Task) -> Done:
        if isinstance(task.context, float):
            await asyncio.sleep(task.context)
        return Done(task.context)

    async def following(task: Task) -> Next:
        return Next({"one": "two", "two": "three"}[task.stage], task.context)

    @worker.stage("spawn.one")
    async def spawn(task: Task) -> Spawn:
        return Spawn([Child("step")] * task.context, then="join")

    @worker.stage("spawn.join")
    async def join(task: Task) -> Done:
        return Done(task.context["children"]["succeeded"])

    worker.stage("stages.one")(following)
    worker.stage("stages.two")(following)
    worker.stage("stages.three")(step)
    return worker


if __name__ == "__main__":
    sys.exit(make_worker().run())
