"""Cancellations that were not requested: client libraries cancel their callers while they close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
