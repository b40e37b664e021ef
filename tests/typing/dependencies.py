"""The types that type checkers infer for middleware, providers and commands of handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import assert_type

from penstock.worker import Backoff, CallNext, Done, Outcome, Task, Worker

worker = Worker()


class Pool:
    """A pool of connections."""

    async def close(self) -> None:
        """Closes it."""


@worker.middleware
async def traced(task: Task, call_next: CallNext) -> Outcome:
    returned = await call_next(task)
    assert_type(returned, Outcome)
    return returned


@worker.middleware  # type: ignore[type-var]  # it must be async
def no_coroutine(task: Task, call_next: CallNext) -> Outcome:
    return Done()


@worker.provide
@worker.on_start
async def db() -> Pool:
    return Pool()


@worker.provide("session")
async def open_session(db: Pool) -> AsyncIterator[str]:
    yield "session"


worker.provide("limit", 3)


@worker.stage("order.charge", backoff=Backoff(base_s=30), concurrency=4)
async def charge(task: Task[int], session: str, *, limit: int) -> Outcome:
    assert_type(task.context, int)
    found = await task.run(["true"])
    assert_type(found.exit_code, int)
    return Done(session * limit)


@worker.stage("order.ship")
def ship(task: Task, db: Pool) -> Outcome:
    assert_type(task.run(["true"], capture=True).stdout, bytes)
    return Done()


# Decorators leave functions as they are.
assert_type(ship(Task(1, "order", "ship", 0, 0, 0, None), Pool()), Outcome)
worker.stage("order.other", concurency=4)  # type: ignore[call-arg]  # a misspelt argument
