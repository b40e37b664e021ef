"""Eight replicas count slow calls together."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from tests.load.callbacks.paced_load import FULL_FORM, Load, Targets
from tests.load.callbacks.run_report import RUN
from tests.support.callback_targets import Bench
from tests.support.waiting import wait_until

pytestmark = FULL_FORM


async def test_eight_replicas_count_to_ten(platform: Bench, targets: Targets, load: Load) -> None:
    """C7b: the tenth slow call makes a target abnormal, on any replica; nine slow calls do
    not."""
    await targets.behave(far={"kind": "hang"})
    (url,) = targets.urls("far", 1)
    settings = {
        "callback_slow_s": 1.0,
        "callback_timeout_s": 10.0,
        "callback_horizon_s": 20.0,
        "callback_target_slots": 16,
        "callback_schedule_s": ("600",),
        "session_timeout_s": 10.0,
    }

    async def count() -> tuple[int, str]:
        row = await platform.connection.fetchrow(
            "SELECT count, state FROM callback_target WHERE url = $1", url
        )
        return (row["count"], row["state"]) if row else (0, "")

    async def is_now(number: int, state: str) -> bool:
        return await count() == (number, state)

    async with AsyncExitStack() as stack:
        # Concurrently: each later start would rebalance the replicas that run already.
        services = [platform.service(**settings) for _ in range(8)]
        await asyncio.gather(*map(stack.enter_async_context, services))
        await load.enqueue_and_write([load.make(url) for _ in range(9)])
        await wait_until(lambda: is_now(9, "normal"))
        await load.enqueue_and_write([load.make(url)])
        await wait_until(lambda: is_now(10, "abnormal"))
    await targets.collect()
    RUN.note("7, replicas", replicas=8, slow_calls_until_abnormal=len(targets.calls_of("far")))
    assert len(targets.calls_of("far")) == 10
