"""Kafka and PostgreSQL, stopped under load and restarted by their supervisor; and workers that join
and leave every second, so that the consumer group rebalances all the time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.chaos.scenario import LONG, TASKS, Scenario, run_scenario

# The signal for a clean stop. On SIGTERM, PostgreSQL would wait for its clients, and pools stay.
CLEAN_STOP = {"kafka": signal.SIGTERM, "postgres": signal.SIGINT}
STORM_S = 60 if LONG else 10


@pytest.mark.long
async def test_restarted_servers_and_constant_rebalances_lose_no_task(tmp_path):
    """O1, W4, design's guarantees 2, 3 and 6: after a restart of the broker, acknowledged tasks are
    done once. A restart of PostgreSQL undoes asynchronous commits and loses no task. Constant
    rebalances lose and double no task."""
    async with run_scenario(tmp_path, "servers") as scenario:
        waves: dict[str, Callable[[], Awaitable[None]]] = {
            f"a worker joins and one leaves each second, {STORM_S} s": partial(storm, scenario)
        }
        for server, clean_stop in CLEAN_STOP.items():
            # Twice for each signal in the full form: the second restart follows a recovery.
            for number in [signal.SIGKILL] * 2 + [clean_stop] * 2 if LONG else [signal.SIGKILL]:
                waves[f"{number.name} {server} ({len(waves)})"] = partial(scenario.restart, server, number)
        for name, inject in waves.items():
            await scenario.wave(name, inject, tasks=TASKS // len(waves))


async def storm(scenario: Scenario) -> None:
    """Starts a worker, and ends one, each second."""
    for _ in range(STORM_S):
        scenario.workers.start()
        leaver = scenario.rng.choice(scenario.workers.running[:-1])
        if scenario.rng.random() < 0.5:
            scenario.workers.kill(leaver)
        else:
            scenario.workers.leave(leaver)
        await asyncio.sleep(1)
