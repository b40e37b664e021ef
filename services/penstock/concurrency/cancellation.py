"""Cancellations that were not requested, and time limits in tasks that were cancelled.

Client libraries cancel their callers while they close. Early versions of Python 3.11 cancel a
cleanup whose time limit ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


@contextmanager
def own_cancellation(make_error: Callable[[], Exception]) -> Iterator[None]:
    """Cancels the block if its task was cancelled, and only then.

    aiokafka mixes up the cancellation of its caller with that of its own tasks while it closes.
    aiohttp cancels requests whose name is being resolved when another closes their session. A
    service would go on instead of stopping, or a part of it would end without an error.

    Args:
        make_error: makes the error that is raised when a library has cancelled a part of itself.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0

    def cancelled() -> bool:
        return task is not None and task.cancelling() > before

    try:
        yield
    except asyncio.CancelledError as error:
        if not cancelled():
            raise make_error() from error
        raise
    if cancelled():
        raise asyncio.CancelledError


@asynccontextmanager
async def cleanup_timeout(limit_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, also in a task that was cancelled before, for its cleanup.

    Before Python 3.11.4, `asyncio.timeout` raises `CancelledError` there when the time is over. The
    cleanup then skips its other steps: a consumer stays in its group, and connections stay open.

    Args:
        limit_s: seconds for the block.

    Raises:
        TimeoutError: the time was over.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except asyncio.CancelledError as error:
        if limit.expired() and task is not None and task.cancelling() <= before:
            raise TimeoutError from error
        raise
