"""Issue 5, number 7: killed with its hands full, and eight that judge as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.callback_targets import Bench
from tests.load.callbacks.arena import LONG, Load, Targets
from tests.load.callbacks.figures import RUN
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


async def test_kill_9_with_calls_in_flight(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """Number 7: nothing is lost, and what comes twice was in flight and comes with the same id."""
    flight, timeout_s = (1000, 10) if LONG else (100, 5)
    await targets.behave(far={"kind": "hang"})
    # Nothing is slow here: it is the kill that is tried.
    settings = {
        "callback_slots": str(flight),
        "max_in_flight": str(10 * flight),
        "callback_timeout_s": str(timeout_s),
        "callback_horizon_s": str(2 * timeout_s),
        "callback_slow_s": str(2 * timeout_s),
        "callback_republish_s": str(2 * timeout_s),
        "callback_suspicion_share": "0",
    }
    ours = [load.make(url) for url in targets.urls("far", flight + flight // 2)]
    async with platform.process(tmp_path, **settings) as process:
        await load.owe(ours)

        async def full() -> bool:
            await targets.collect()
            return (
                targets.under_way.get("far", 0) >= 0.75 * flight and len(set(targets.ids())) >= 0.75 * flight
            )

        await wait_until(full, timeout=60)
        process.kill()
        await process.wait()
    await targets.collect()
    in_flight = set(targets.ids())
    await targets.behave(far={"after_s": 0.02})
    async with platform.process(tmp_path, **settings):
        await wait_until(platform.all_delivered, timeout=120)
        await targets.collect()
    times = Counter(targets.ids())
    twice = {name for name, count in times.items() if count > 1}
    RUN.note(
        "7, kill", in_flight=len(in_flight), owed=len(ours), lost=len(ours) - len(times), twice=len(twice)
    )
    assert set(times) == {callback.id for callback in ours}
    assert twice <= in_flight
    assert max(times.values()) == 2


async def test_eight_replicas_count_to_ten(platform: Bench, targets: Targets, load: Load) -> None:
    """Number 7: nine slow calls do not make it abnormal, the tenth does, whoever's replica it is."""
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
        # All at once: one by one each of them would have the others begin anew.
        services = [platform.service(**settings) for _ in range(8)]
        await asyncio.gather(*map(stack.enter_async_context, services))
        await load.owe([load.make(url) for _ in range(9)])
        await wait_until(lambda: is_now(9, "normal"))
        await load.owe([load.make(url)])
        await wait_until(lambda: is_now(10, "abnormal"))
    await targets.collect()
    RUN.note("7, replicas", replicas=8, slow_calls_until_abnormal=len(targets.of("far")))
    assert len(targets.of("far")) == 10
