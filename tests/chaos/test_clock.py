"""Wall clocks of single processes that jump by two hours, forwards and backwards, and that
drift."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from penstock.local.deployment import SERVICES
from tests.chaos import clocks
from tests.chaos.scenario import LONG, TASKS, Scenario, run_scenario

# Kafka refuses records that a writer stamps more than an hour ahead.
STEP_S = 7200
# How long a clock stays behind.
WRONG_S = 4
# How far a clock drifts in one direction, a second every tenth of a second.
DRIFT_S = 20
# Longer than any stall of the machine, and much shorter than the step: only a clock makes an
# attempt expire.
LEASE_S = 60
# The short form steps the clocks of a worker and of all services at once, in fewer waves.
EACH = [*SERVICES, "worker", "postgres", "java"]

Inject = Callable[[], Awaitable[None]]


@pytest.mark.long
@pytest.mark.skipif(clocks.missing() is not None, reason=str(clocks.missing()))
async def test_clocks_that_step_by_two_hours_or_drift(tmp_path, monkeypatch):
    """W4, design's guarantees 2, 3 and 6: a clock that jumps by two hours, or drifts, loses and
    doubles no task and delays no retry by hours. It ends no live attempt; the clock of a process of
    ours ends no process."""
    clock = clocks.Clocks(tmp_path / "clocks", EACH)
    # The servers inherit this environment; services get their clocks by a prefix of their commands.
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    services = {
        name: replace(each, argv=(*clock.prefix(name), *each.argv)) for name, each in SERVICES.items()
    }
    async with run_scenario(
        tmp_path, "clock", workers=1, services=services, lease_ms=LEASE_S * 1000
    ) as scenario:
        scenario.workers.start(prefix=clock.prefix("worker"))
        victims: list[tuple[str, ...]] = [(name,) for name in EACH]
        if not LONG:
            victims = [("worker", *SERVICES), ("postgres",), ("java",)]
        scenario.rng.shuffle(victims)
        waves = 3 * len(victims)
        for names in victims:
            for fault, inject in (
                (f"{STEP_S:+} s", partial(step, clock, names, STEP_S)),
                (f"{-STEP_S:+} s", partial(step_back, clock, names, STEP_S)),
                ("drifting", partial(drift, clock, names)),
            ):
                await run_wave(scenario, names, fault, inject, TASKS // waves)
                # Only now: the delays that a clock ahead has computed would last hours longer.
                await step(clock, names, 0)


async def step(clock: clocks.Clocks, names: tuple[str, ...], seconds: int) -> None:
    """Sets clocks."""
    for name in names:
        clock.step(name, seconds)


async def step_back(clock: clocks.Clocks, names: tuple[str, ...], seconds: int) -> None:
    """Sets clocks back, and corrects them before the end of the wave: tasks with a delay are due
    only then."""
    await step(clock, names, -seconds)
    await asyncio.sleep(WRONG_S)
    await step(clock, names, 0)


async def drift(clock: clocks.Clocks, names: tuple[str, ...]) -> None:
    """Lets clocks run ten times too fast, and then backwards until they are right."""
    for seconds in (*range(DRIFT_S), *reversed(range(DRIFT_S))):
        await step(clock, names, seconds)
        await asyncio.sleep(0.1)


async def run_wave(
    scenario: Scenario, names: tuple[str, ...], fault: str, inject: Inject, tasks: int
) -> None:
    """Runs a wave during which clocks are wrong."""
    expired = "SELECT count(*) FROM penstock.attempt WHERE outcome = 'expired'"
    before, exits = await scenario.fetch_value(expired), scenario.exits()
    owner = "a worker and every service" if len(names) > 1 else names[0]
    await scenario.wave(f"clock of {owner} {fault}", inject, tasks=tasks)
    assert await scenario.fetch_value(expired) == before, f"the clock of {owner} ended a live attempt"
    if "java" not in names:
        # The broker may end sessions by its own clock.
        assert scenario.exits() == exits, f"the clock of {owner} ended a process"
