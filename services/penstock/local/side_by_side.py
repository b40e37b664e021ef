"""Two things at once, and blocking ones that must come to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def run_both(first: Coroutine[Any, Any, _T], second: Coroutine[Any, Any, _T]) -> tuple[_T, _T]:
    """Runs both at once; if one raises, the other is cancelled and waited for, and the first exception passed on."""
    tasks = [asyncio.create_task(first), asyncio.create_task(second)]
    try:
        one, other = await asyncio.gather(*tasks)
        return one, other
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def to_the_end(function: Callable[[], None]) -> None:
    """Runs a blocking function in a thread and waits for its end even when cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
