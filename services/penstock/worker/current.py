"""The attempt that runs here: known to the handler, and to all code that it calls or starts.

A context variable carries it. Tasks of asyncio copy their creator's context, and the worker copies
it to the threads of synchronous handlers. `asyncio.to_thread` does the same. A thread that a
handler starts by itself, or a pool's, has it in functions that went through `in_current_task`.
Threads are not patched: a pool's thread works for one task after another, and would keep the first
one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import ParamSpec, TypeVar

from penstock.worker.outcomes import Task

P = ParamSpec("P")
R = TypeVar("R")

current_attempt: ContextVar[Task | None] = ContextVar("penstock_current_attempt", default=None)


def current_task() -> Task:
    """The task whose handler runs this code, for code that does not receive it as an argument.

    Raises:
        RuntimeError: no handler runs this code.
    """
    task = current_attempt.get()
    if task is None:
        raise RuntimeError(
            "no handler runs this code: call it from a stage, or give a thread of your own a function from "
            "penstock.worker.in_current_task()"
        )
    return task


def in_current_task(function: Callable[P, R]) -> Callable[P, R]:
    """The function for other threads: what it logs and prints there is in the log of this task.

    `pool.map(in_current_task(encode), frames)` and `Thread(target=in_current_task(encode))` need
    it; `asyncio.to_thread` and synchronous handlers do not. Context variables have the values of
    this call. Outside a handler the function only has these.

    Args:
        function: may run on several threads at once.
    """
    context = copy_context()

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # A context can be entered by one thread at a time.
        return context.copy().run(function, *args, **kwargs)

    return run


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


class attempt_scope:  # noqa: N801 (used as a function; a generator costs three times as much)
    """Makes the attempt the current one of this context for a `with` block."""

    __slots__ = ("_task", "_token")

    def __init__(self, task: Task) -> None:
        self._task = task

    def __enter__(self) -> None:
        self._token = current_attempt.set(self._task)

    def __exit__(self, *_: object) -> None:
        current_attempt.reset(self._token)
