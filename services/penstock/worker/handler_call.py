"""Calls a handler: its timeout, and the thread of one that is no coroutine function."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.contracts.result import Failure
from penstock.worker.outcomes import Task
from penstock.worker.threads import start_thread

# Seconds that a handler gets to end after its cancellation, before it is abandoned.
ABANDON_S = 5.0


class HandlerTimeout:
    """The timeout of a handler, as a `with` block around it.

    Costs a third of `asyncio.timeout`, and handles a handler that swallows its cancellation.

    Args:
        timeout_s: seconds until the handler is cancelled.
        abandon: called when the handler has not ended `abandon_s` after its cancellation.
        abandon_s: seconds after the cancellation.

    Attributes:
        abandoned: whether `abandon` was called.
        on_thread: whether a thread of the handler runs, which cannot be ended from outside.
    """

    def __init__(
        self, timeout_s: float, abandon: Callable[[Failure], None], abandon_s: float = ABANDON_S
    ) -> None:
        self._abandon_s = abandon_s
        self.abandoned = False
        self.on_thread = False
        self._timeout_s = timeout_s
        self._abandon = abandon
        self._expired = False
        self._task: asyncio.Task[Any]
        self._timer: asyncio.TimerHandle

    def __enter__(self) -> None:
        current = asyncio.current_task()
        assert current is not None
        self._task = current
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self._timer.cancel()
        if not self._expired:
            return
        other_cancellations = self._task.uncancel()
        # Another cancellation is the worker's stop, and has precedence. A handler that swallowed
        # the timeout's cancellation and ended has its own outcome.
        if isinstance(error, asyncio.CancelledError) and other_cancellations == 0:
            thread = "; its thread was abandoned" if self.on_thread else ""
            raise TimeoutError(f"the handler took longer than {self._timeout_s:g} s{thread}") from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._abandon_s, self._abandon_handler)

    def _abandon_handler(self) -> None:
        self.abandoned = True
        message = (
            f"the handler took longer than {self._timeout_s:g} s, swallowed its cancellation "
            f"and was abandoned {self._abandon_s:g} s later"
        )
        self._abandon(Failure(kind="Timeout", message=message))


class Raised(Exception):  # noqa: N818 (not an error of its own)
    """Carries a synchronous handler's error: `StopIteration` cannot leave a coroutine."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


async def call_on_thread(handler: Callable[[Task], Any], task: Task, limit: HandlerTimeout) -> Any:
    """The outcome of a handler that is no coroutine function.

    It may still return a coroutine, as a lambda does or a decorated function. Only a call can show
    that, so it is made on a thread, which the other kind needs.

    Raises:
        Raised: the handler has raised an error on its thread.
        Exception: raised by its coroutine.
    """
    future = start_thread(partial(handler, task), f"{task.type}.{task.stage}-{task.attempt_id}")
    limit.on_thread = True
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        # The thread is abandoned, and its permit goes to another attempt.
        task.cancel()
        future.cancel()
        raise
    limit.on_thread = False
    returned, error = future.result()
    if error is not None:
        raise Raised(error)
    return await returned if inspect.isawaitable(returned) else returned
