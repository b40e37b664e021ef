"""Time limits of cleanups."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.waiting import in_time

from penstock.concurrency.cancellation import cleanup_timeout


async def test_a_cleanup_goes_on_after_its_time_limit() -> None:
    """O3: its task was cancelled before. Before Python 3.11.4, `asyncio.timeout` raises a
    cancellation there, and the steps behind the limit would be skipped."""
    began, steps = asyncio.Event(), []

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            with pytest.raises(TimeoutError):
                async with cleanup_timeout(0.01):
                    await asyncio.Event().wait()
            steps.append("the next step")

    task = asyncio.create_task(work())
    await began.wait()
    task.cancel()
    await in_time(asyncio.wait({task}))
    assert task.cancelled()
    assert steps == ["the next step"]


async def test_a_cancellation_ends_a_cleanup() -> None:
    """O3: a second cancellation is no end of the time limit."""
    began = asyncio.Event()

    async def work() -> None:
        async with cleanup_timeout(1_000.0):
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await began.wait()
    task.cancel()
    await in_time(asyncio.wait({task}))
    assert task.cancelled()
