"""Wall clocks of single processes that jump by an hour, forwards and backwards."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from penstock.local.deployment import SERVICES
from tests.chaos import clocks
from tests.chaos.scenario import LONG, TASKS, Scenario, run_scenario

HOUR_S = 3600
# How long a clock stays behind, in seconds: longer than a lease.
WRONG_S = 4
# The short form steps the clocks of all services at once, which takes fewer waves.
EACH = [*SERVICES, "worker", "postgres", "java"]


@pytest.mark.long
@pytest.mark.skipif(clocks.missing() is not None, reason=str(clocks.missing()))
async def test_clock_steps_by_an_hour(tmp_path, monkeypatch):
    """W4, design's guarantees 2, 3 and 6: a clock that jumps by an hour loses and doubles no task. It expires
    no lease of a live worker and delays no retry by an hour."""
    clock = clocks.Clocks(tmp_path / "clocks", EACH)
    # The servers inherit this environment; services get their clocks by a prefix of their commands.
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    services = {
        name: replace(each, argv=(*clock.prefix(name), *each.argv)) for name, each in SERVICES.items()
    }
    async with run_scenario(tmp_path, "clock", workers=1, services=services) as scenario:
        scenario.workers.start(prefix=clock.prefix("worker"))
        victims: list[tuple[str, ...]] = [(name,) for name in EACH]
        if not LONG:
            victims = [("worker",), tuple(SERVICES), ("postgres",), ("java",)]
        scenario.rng.shuffle(victims)
        for names in victims:
            for seconds in (HOUR_S, -HOUR_S):
                await run_wave(scenario, clock, names, seconds, TASKS // len(victims) // 2)


async def run_wave(
    scenario: Scenario, clock: clocks.Clocks, names: tuple[str, ...], seconds: int, tasks: int
) -> None:
    """Runs a wave during which the clocks jump and are corrected again."""

    def jump(seconds: int) -> None:
        for name in names:
            clock.step(name, seconds)

    async def inject() -> None:
        jump(seconds)
        if seconds < 0:
            # Corrected before the end of the wave: tasks with a delay by PostgreSQL's clock are due
            # only then.
            await asyncio.sleep(WRONG_S)
            jump(0)

    owner = "every service" if len(names) > 1 else names[0]
    await scenario.wave(f"clock of {owner} {seconds:+} s", inject, tasks=tasks)
    # A clock ahead is corrected only now: the delays that it computed would last an hour longer.
    jump(0)
