"""Patience with calls: one timer for all of them. All have the same patience, so they run out of it in the order in which they began.

Two timers for each call, until it is slow and until it is ended (`asyncio.timeout`), took a fortieth of what a delivery costs.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Patience(Generic[T]):
    """Tells of each that has begun and has not ended within a time.

    Args:
        seconds: the time.
        ran_out: given one of them, and when that should have been, on the loop's clock; it has ended then.
    """

    __slots__ = ("_ends", "_loop", "_next_s", "_ran_out", "_seconds")

    def __init__(self, seconds: float, ran_out: Callable[[T, float], None]) -> None:
        self._seconds = seconds
        self._ran_out = ran_out
        self._loop = asyncio.get_running_loop()
        # When each runs out of it, the first one first.
        self._ends: OrderedDict[T, float] = OrderedDict()
        # For when the timer is set; None while there is none.
        self._next_s: float | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def begin(self, one: T) -> None:
        """One begins; it has a hash, and no other equals it."""
        self._ends[one] = end_s = self._loop.time() + self._seconds
        if self._next_s is None:
            self._set(end_s)

    def end(self, one: T) -> None:
        """One has ended; nothing when it has run out of time before."""
        self._ends.pop(one, None)

    def _set(self, next_s: float) -> None:
        self._next_s = next_s
        self._loop.call_at(next_s, self._look, next_s)

    def _look(self, now_s: float) -> None:
        # The timer may be late; it may also be early by what the loop's clock rounds.
        now_s = max(now_s, self._loop.time())
        self._next_s = None
        if not self._ends:
            return
        one, end_s = next(iter(self._ends.items()))
        if end_s > now_s:
            self._set(end_s)
            return
        del self._ends[one]
        if self._ends:
            # One at a time, the next of them as soon as the loop comes to it: what goes wrong with one is its own affair.
            self._set(next(iter(self._ends.values())))
        self._ran_out(one, end_s)


class Deadline:
    """A `with` block that is cancelled at its end, and leaves with a TimeoutError then; made by `Deadlines`."""

    __slots__ = ("_cancelling", "_expired", "_patience", "_task")

    def __init__(self, patience: Patience[Deadline], task: asyncio.Task[Any]) -> None:
        self._patience = patience
        self._task = task
        self._cancelling = task.cancelling()
        self._expired = False

    def expire(self) -> None:
        """It is time."""
        self._expired = True
        self._task.cancel()

    def __enter__(self) -> None:
        self._patience.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._patience.end(self)
        # Whoever else has cancelled the task meanwhile is heard, as by `asyncio.timeout`.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error


class Deadlines:
    """What `asyncio.timeout` is, for many blocks that all have the same time.

    Args:
        seconds: the time.
    """

    def __init__(self, seconds: float) -> None:
        self._patience: Patience[Deadline] = Patience(seconds, lambda deadline, _at_s: deadline.expire())

    def begin(self) -> Deadline:
        """One for the task that asks, for a block that it enters now.

        Raises:
            RuntimeError: there is no task.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline is a task's")
        return Deadline(self._patience, task)
