"""A kill with calls in flight, and eight replicas that count slow calls
together."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.load.callbacks.paced_load import LONG, Load, Targets
from tests.load.callbacks.run_report import RUN
from tests.support.callback_targets import Bench
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long


async def test_a_kill_with_calls_in_flight_loses_no_callback(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C1: a kill -9 loses no callback. Only callbacks in flight arrive twice, with the
    same id."""
    flight, timeout_s = (1000, 10) if LONG else (100, 5)
    await targets.behave(far={"kind": "hang"})
    # No call counts as slow: this test is about the kill.
    settings = {
        "callback_slots": str(flight),
        "max_in_flight": str(10 * flight),
        "callback_timeout_s": str(timeout_s),
        "callback_horizon_s": str(2 * timeout_s),
        "callback_slow_s": str(2 * timeout_s),
        "callback_republish_s": str(2 * timeout_s),
        "callback_suspicion_share": "0",
    }
    callbacks = [load.make(url) for url in targets.urls("far", flight + flight // 2)]
    async with platform.process(tmp_path, **settings) as process:
        await load.enqueue_and_write(callbacks)

        async def full() -> bool:
            await targets.collect()
            return (
                targets.in_flight.get("far", 0) >= 0.75 * flight and len(set(targets.ids())) >= 0.75 * flight
            )

        await wait_until(full)
        process.kill()
        await process.wait()
    await targets.collect()
    in_flight = set(targets.ids())
    await targets.behave(far={"after_s": 0.02})
    async with platform.process(tmp_path, **settings):
        await wait_until(platform.all_delivered)
        await targets.collect()
    calls_by_id = Counter(targets.ids())
    twice = {name for name, count in calls_by_id.items() if count > 1}
    RUN.note(
        "7, kill",
        in_flight=len(in_flight),
        enqueued=len(callbacks),
        lost=len(callbacks) - len(calls_by_id),
        twice=len(twice),
    )
    assert set(calls_by_id) == {callback.id for callback in callbacks}
    assert twice <= in_flight
    assert max(calls_by_id.values()) == 2


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
