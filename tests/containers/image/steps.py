"""A worker of three short stages, as in the image of a user."""

import asyncio

from penstock.worker import Done, Next, Task, Worker

worker = Worker()


@worker.stage("steps.one")
async def one(task: Task) -> Next:
    await asyncio.sleep(0.05)
    return Next("two", task.context)


# A synchronous handler, which runs on a thread.
@worker.stage("steps.two")
def two(task: Task) -> Next:
    return Next("three", task.context)


@worker.stage("steps.three")
async def three(task: Task) -> Done:
    return Done(task.context)


worker.run()
