"""Kill -9 of every service in turn, and of workers, in the middle of the work."""

import pytest

from penstock.local.deployment import SERVICES
from tests.chaos.arena import TASKS, arena


@pytest.mark.slow
async def test_kill_each_in_turn(tmp_path):
    """O1, W4, design's guarantees 2, 3 and 6: whatever is killed, everything ends well, no stage takes effect
    twice, no event is lost, and the check is clean."""
    async with arena(tmp_path, "kill") as field:
        parties = field.parties([*SERVICES, "worker", "worker"])
        for party in parties:

            async def strike(party: list[str] = party) -> None:
                for victim in party:
                    if victim == "worker":
                        field.workers.kill(field.chance.choice(field.workers.running))
                        field.workers.start()
                    else:
                        field.kill(victim)

            await field.wave(f"kill -9 {', '.join(party)}", strike, tasks=TASKS // len(parties))
