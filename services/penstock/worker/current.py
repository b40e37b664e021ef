"""The attempt that runs here: known to the handler, and to all code that it calls or starts.

A context variable carries it. Tasks of asyncio copy their creator's context, and the worker copies
it to the threads of synchronous handlers. A thread that a handler starts by itself has it only if
the handler copies the context (`contextvars.copy_context().run`), or uses `asyncio.to_thread`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from penstock.worker.log_buffer import RunLog
from penstock.worker.outcomes import Task


@dataclass(frozen=True, slots=True)
class CurrentAttempt:
    """An attempt that runs.

    Attributes:
        task: the handler's argument.
        log: of its run; None when task logs are off.
    """

    task: Task
    log: RunLog | None = None

    def ids(self) -> dict[str, object]:
        """The fields of a log entry about this attempt."""
        task = self.task
        return {
            "task": task.id,
            "step": task.step,
            "stage": task.stage,
            "attempt": task.attempt,
            "task_type": task.type,
        }


current_attempt: ContextVar[CurrentAttempt | None] = ContextVar("penstock_current_attempt", default=None)


def current_task() -> Task:
    """The task whose handler runs this code, for code that does not receive it as an argument.

    Raises:
        RuntimeError: no handler runs this code.
    """
    attempt = current_attempt.get()
    if attempt is None:
        raise RuntimeError(
            "no handler runs this code: call it from a stage, or copy the context to a thread of your own "
            "(contextvars.copy_context().run)"
        )
    return attempt.task


def current_ids() -> dict[str, object]:
    """The ids of the task whose handler runs this code, as fields of a log entry; else none."""
    attempt = current_attempt.get()
    return {} if attempt is None else attempt.ids()


@contextmanager
def attempt_scope(attempt: CurrentAttempt) -> Iterator[None]:
    """Makes the attempt the current one of this context for a `with` block."""
    token = current_attempt.set(attempt)
    try:
        yield
    finally:
        current_attempt.reset(token)
