"""Workers that come and go every second, so that the group of the workers never settles."""

import asyncio

import pytest

from tests.chaos.arena import LONG, TASKS, arena

SECONDS = 60 if LONG else 10


@pytest.mark.slow
async def test_rebalance_storm(tmp_path):
    """W4, design's guarantees 2, 3 and 6: partitions that move all the time lose and double nothing."""
    async with arena(tmp_path, "storm") as field:

        async def storm() -> None:
            for _ in range(SECONDS):
                field.workers.start()
                leaver = field.chance.choice(field.workers.running[:-1])
                if field.chance.random() < 0.5:
                    field.workers.kill(leaver)
                else:
                    field.workers.leave(leaver)
                # The storm's pace.
                await asyncio.sleep(1)

        await field.wave(f"a worker joins and one leaves each second, {SECONDS} s", storm, tasks=TASKS)
