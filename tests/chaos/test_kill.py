"""Kill -9 of every service in turn, and of workers, in the middle of the work."""

import pytest

from penstock.local.deployment import SERVICES
from tests.chaos.arena import TASKS, arena


@pytest.mark.slow
async def test_kill_each_in_turn(tmp_path):
    """O1, W4, design's guarantees 2, 3 and 6: whatever is killed, everything ends well, no stage takes effect
    twice, no event is lost, and the check is clean."""
    async with arena(tmp_path, "kill") as field:
        victims = [*SERVICES, "worker", "worker"]
        field.chance.shuffle(victims)
        for victim in victims:

            async def strike(victim: str = victim) -> None:
                if victim == "worker":
                    field.workers.kill(field.chance.choice(field.workers.running))
                    field.workers.start()
                else:
                    field.kill(victim)

            await field.wave(f"kill -9 {victim}", strike, tasks=TASKS // len(victims))
