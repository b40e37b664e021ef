"""When a type is woken after a limit or a lock."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.support.waiting import wait_until

from penstock.concurrency.event_loop import event_loop_factory
from penstock.task_sync.limits import ReleaseLimiter


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, event_loop_factory()])
def test_a_type_is_woken_once_at_the_earliest_of_its_times(loop_factory: Any) -> None:
    """S5, S12: the earliest of several waits wakes the type. On uvloop a wait of less than half a
    millisecond has a handle without a time."""

    async def run() -> list[str]:
        woken: list[str] = []
        limiter = ReleaseLimiter(cast(Any, None), woken.append)
        for wait_s in (60.0, 0.0001, 60.0):
            limiter._wake_after("short", wait_s)
        limiter._wake_after("long", 60.0)
        await wait_until(lambda: woken, what="the type is woken")
        limiter._wake_after("short", 0.01)
        await wait_until(lambda: len(woken) > 1, what="the type is woken again")
        limiter.close()
        return woken

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(run()) == ["short", "short"]
