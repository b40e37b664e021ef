"""Workers that join and leave every second, so that the consumer group rebalances all the time."""

import asyncio

import pytest

from tests.chaos.scenario import LONG, TASKS, run_scenario

SECONDS = 60 if LONG else 10


@pytest.mark.long
async def test_constant_rebalances_lose_no_task(tmp_path):
    """W4, design's guarantees 2, 3 and 6: constant rebalances lose and double no task."""
    async with run_scenario(tmp_path, "storm") as scenario:

        async def storm() -> None:
            for _ in range(SECONDS):
                scenario.workers.start()
                leaver = scenario.rng.choice(scenario.workers.running[:-1])
                if scenario.rng.random() < 0.5:
                    scenario.workers.kill(leaver)
                else:
                    scenario.workers.leave(leaver)
                # One change each second.
                await asyncio.sleep(1)

        await scenario.wave(f"a worker joins and one leaves each second, {SECONDS} s", storm, tasks=TASKS)
