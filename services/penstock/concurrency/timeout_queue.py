"""One timer for many calls with the same timeout: they time out in the order in which they began.

Two timers per call (until it is slow, and `asyncio.timeout`) cost 2.5% of a delivery.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TimeoutQueue(Generic[T]):
    """Reports each item that is not removed within a time.

    Args:
        timeout_s: the time in seconds.
        on_timeout: called with the item, which is removed by then, and when it was due, on the
            loop's clock.
    """

    __slots__ = ("_due_s", "_loop", "_on_timeout", "_timeout_s", "_timer_s")

    def __init__(self, timeout_s: float, on_timeout: Callable[[T, float], None]) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        # When each item times out, the earliest first.
        self._due_s: OrderedDict[T, float] = OrderedDict()
        # When the timer fires; None without a timer.
        self._timer_s: float | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: T) -> None:
        """Starts the time of an item, which must be hashable and unequal to the others."""
        self._due_s[item] = due_s = self._loop.time() + self._timeout_s
        if self._timer_s is None:
            self._set_timer(due_s)

    def remove(self, item: T) -> None:
        """Removes an item if it has not timed out."""
        self._due_s.pop(item, None)

    def _set_timer(self, due_s: float) -> None:
        self._timer_s = due_s
        self._loop.call_at(due_s, self._check, due_s)

    def _check(self, now_s: float) -> None:
        # The timer may fire late, and early by the rounding of the loop's clock.
        now_s = max(now_s, self._loop.time())
        self._timer_s = None
        if not self._due_s:
            return
        item, due_s = next(iter(self._due_s.items()))
        if due_s > now_s:
            self._set_timer(due_s)
            return
        del self._due_s[item]
        if self._due_s:
            # One item per timer, so that an error of one does not stop the others.
            self._set_timer(next(iter(self._due_s.values())))
        self._on_timeout(item, due_s)


class Deadline:
    """A `with` block that raises TimeoutError at its deadline; made by `Deadlines`."""

    __slots__ = ("_cancelling", "_expired", "_queue", "_task")

    def __init__(self, queue: TimeoutQueue[Deadline], task: asyncio.Task[Any]) -> None:
        self._queue = queue
        self._task = task
        self._cancelling = task.cancelling()
        self._expired = False

    def expire(self) -> None:
        """Cancels the block."""
        self._expired = True
        self._task.cancel()

    def __enter__(self) -> None:
        self._queue.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._queue.remove(self)
        # As in `asyncio.timeout`: another cancellation of the task takes precedence.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error


class Deadlines:
    """`asyncio.timeout` for many blocks with the same timeout.

    Args:
        timeout_s: the timeout in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._queue: TimeoutQueue[Deadline] = TimeoutQueue(
            timeout_s, lambda deadline, _due_s: deadline.expire()
        )

    def start(self) -> Deadline:
        """A deadline for the current task, whose block must be entered at once.

        Raises:
            RuntimeError: there is no current task.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a running task")
        return Deadline(self._queue, task)
