"""Waits for conditions: a test never sleeps for a fixed time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def wait_until(
    condition: Callable[[], T | Awaitable[T]],
    *,
    timeout: float = 120.0,  # noqa: ASYNC109 (asyncio.timeout would hide the last answer)
    every: float = 0.02,
    what: str = "",
) -> T:
    """Calls `condition`, plain or async, until its result is true, and returns that result.

    Raises:
        TimeoutError: the result was not true within `timeout` seconds; the message has `what`
        and the last result.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{what or inspect.getsource(condition).strip()}: still {answer!r} after {timeout:g} s"
            )
        await asyncio.sleep(every)


async def in_time(
    awaitable: Awaitable[T],
    timeout: float = 120.0,  # noqa: ASYNC109 (callers await one thing)
) -> T:
    """Returns the result of `awaitable`, however long a loaded machine takes for it.

    Raises:
        TimeoutError: there was no result within `timeout` seconds, and `awaitable` is cancelled.
    """
    async with asyncio.timeout(timeout):
        return await awaitable


def wait_until_blocking(condition: Callable[[], T], *, timeout: float = 120.0, what: str = "") -> T:
    """`wait_until` for tests without an event loop."""
    return asyncio.run(wait_until(condition, timeout=timeout, what=what))
