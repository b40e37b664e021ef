"""Running two coroutines concurrently, and blocking functions that must finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def run_both(first: Coroutine[Any, Any, _T], second: Coroutine[Any, Any, _T]) -> tuple[_T, _T]:
    """Runs both. When one raises, cancels and awaits the other, then raises its exception."""
    tasks = [asyncio.create_task(first), asyncio.create_task(second)]
    try:
        first_result, second_result = await asyncio.gather(*tasks)
        return first_result, second_result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def run_to_completion(function: Callable[[], None]) -> None:
    """Runs a blocking function in a thread and waits until it returns, even when cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
