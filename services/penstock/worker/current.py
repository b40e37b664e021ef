"""The attempt that runs here: known to the handler, and to all code that it calls or starts.

A context variable carries it. Tasks of asyncio copy their creator's context, and the worker copies
it to the threads of synchronous handlers. A thread that a handler starts by itself has it only if
the handler copies the context (`contextvars.copy_context().run`), or uses `asyncio.to_thread`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from penstock.worker.outcomes import Task

current_attempt: ContextVar[Task | None] = ContextVar("penstock_current_attempt", default=None)


def current_task() -> Task:
    """The task whose handler runs this code, for code that does not receive it as an argument.

    Raises:
        RuntimeError: no handler runs this code.
    """
    task = current_attempt.get()
    if task is None:
        raise RuntimeError(
            "no handler runs this code: call it from a stage, or copy the context to a thread of your own "
            "(contextvars.copy_context().run)"
        )
    return task


def ids_of(task: Task) -> dict[str, object]:
    """The fields of a log entry about an attempt."""
    return {
        "task": task.id,
        "step": task.step,
        "stage": task.stage,
        "attempt": task.attempt,
        "task_type": task.type,
    }


def current_ids() -> dict[str, object]:
    """The ids of the task whose handler runs this code, as fields of a log entry; else none."""
    task = current_attempt.get()
    return {} if task is None else ids_of(task)


@contextmanager
def attempt_scope(task: Task) -> Iterator[None]:
    """Makes the attempt the current one of this context for a `with` block."""
    token = current_attempt.set(task)
    try:
        yield
    finally:
        current_attempt.reset(token)
