"""SIGSTOP, and SIGCONT after a while: whoever stood still does not know it, and goes on where it was.

A worker that wakes up reports attempts that were given to others; a service that does, writes what was decided without it.
"""

import pytest

from penstock.local.deployment import SERVICES
from penstock.process import EXIT_FAILED, STALL_S
from tests.chaos.arena import LONG, TASKS, arena

# Above a lease; the longer ones also above a session, and a stall.
DURATIONS = (20, 60) if LONG else (5,)
SERVERS = ("kafka", "postgres") if LONG else ()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", DURATIONS)
async def test_stop_each_in_turn(tmp_path, seconds):
    """W4, design's guarantees 2, 3 and 6: whatever stands still for a while, nothing is lost, no stage takes effect
    twice and no attempt that was given to another is committed."""
    # Who stood still for that long ends when it wakes up (O2a): a service's supervisor starts it again, the other worker
    # has the work of one that is gone.
    statuses = frozenset({0, EXIT_FAILED} if seconds >= STALL_S else {0})
    async with arena(tmp_path, f"stop {seconds} s", statuses=statuses) as field:
        parties = field.parties([*SERVICES, *SERVERS, "worker"])
        for party in parties:

            async def strike(party: list[str] = party) -> None:
                running = field.deployment.processes
                running["worker"] = field.chance.choice(field.workers.running).pid
                await field.stop_for(seconds, *[running[victim] for victim in party])

            fault = f"SIGSTOP {', '.join(party)}, {seconds} s"
            await field.wave(fault, strike, tasks=TASKS // len(parties))
