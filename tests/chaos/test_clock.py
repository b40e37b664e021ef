"""Clocks that jump by an hour, forth and back, under single processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from penstock.local.deployment import SERVICES
from tests.chaos import clocks
from tests.chaos.arena import LONG, TASKS, Field, arena

HOUR_S = 3600
# How long a clock that runs behind does: more than a lease.
WRONG_S = 4
# The short form steps everybody's at once: each in turn takes as many waves.
EACH = [*SERVICES, "worker", "postgres", "java"]


@pytest.mark.slow
@pytest.mark.skipif(clocks.missing() is not None, reason=str(clocks.missing()))
async def test_clock_steps_by_an_hour(tmp_path, monkeypatch):
    """W4, design's guarantees 2, 3 and 6: whose clock is wrong by an hour, or jumps, neither loses nor doubles
    anything, expires no lease of the living and delays no retry by an hour."""
    clock = clocks.Clocks(tmp_path / "clocks", EACH)
    # The servers take theirs from our environment; a service's own comes before it.
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    services = {
        name: replace(each, argv=(*clock.prefix(name), *each.argv)) for name, each in SERVICES.items()
    }
    async with arena(tmp_path, "clock", workers=1, services=services) as field:
        field.workers.start(prefix=clock.prefix("worker"))
        victims: list[tuple[str, ...]] = [(name,) for name in EACH]
        if not LONG:
            victims = [("worker",), tuple(SERVICES), ("postgres",), ("java",)]
        field.chance.shuffle(victims)
        for names in victims:
            for seconds in (HOUR_S, -HOUR_S):
                await stepped(field, clock, names, seconds, TASKS // len(victims) // 2)


async def stepped(
    field: Field, clock: clocks.Clocks, names: tuple[str, ...], seconds: int, tasks: int
) -> None:
    """A wave in whose midst the clock jumps, and is set right again."""

    def jump(seconds: int) -> None:
        for name in names:
            clock.step(name, seconds)

    async def strike() -> None:
        jump(seconds)
        if seconds < 0:
            # Set right before the wave has ended: what PostgreSQL's own clock was to wake cannot be due before.
            await asyncio.sleep(WRONG_S)
            jump(0)

    who = "every service" if len(names) > 1 else names[0]
    await field.wave(f"clock of {who} {seconds:+} s", strike, tasks=tasks)
    # Only now where it had run ahead: what was put off by it while it did would be put off by an hour.
    jump(0)
