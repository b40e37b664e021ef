"""Celery's canvas on Redis: a chain, a chord, and tasks that replace themselves with a task.

The settings are those of `benchmarks.peers.celery_chain`, with a result backend on the same Redis:
a chord counts its results there. `Task.replace` is Celery's way for a task to go on as other work;
ten replacements are the nesting of ten.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from celery import Task, chain, chord

from benchmarks.peers import job
from benchmarks.peers.celery_chain import app

app.conf.update(result_backend=f"redis+socket://{os.environ[job.REDIS]}", task_ignore_result=False)


@app.task
def step(_given: Any) -> None:
    """A task that does nothing."""


@app.task
def last(context: dict[str, Any]) -> None:
    """The last task of a flow."""
    job.ended(context)


@app.task(bind=True)
def nested(self: Task, context: dict[str, Any], depth: int) -> None:
    """A level: a task that goes on as the next level."""
    following = nested.si(context, depth + 1) if depth + 1 < job.DEPTH else last.si(context)
    raise self.replace(following)


async def prepare() -> None:
    """Needs nothing."""


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Sends a canvas. The call blocks: Celery's client is synchronous."""

    async def submit(context: dict[str, Any]) -> None:
        flow = context.get("flow", "chain")
        if flow == "chain":
            chain(step.si(1), step.si(2), last.si(context)).apply_async()
        elif flow == "join":
            chord((step.si(number) for number in range(job.JOIN)), last.si(context)).apply_async()
        else:
            nested.si(context, 1).apply_async()

    yield submit
