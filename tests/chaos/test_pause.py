"""SIGSTOP, and SIGCONT after a while: the paused process continues without knowing of its pause.

A paused worker reports attempts that other workers have taken over. A paused service writes
decisions that are stale.
"""

import pytest

from penstock.local.deployment import SERVICES
from penstock.process import EXIT_FAILED, STALL_S
from tests.chaos.scenario import LONG, TASKS, run_scenario

# Longer than a lease; the longer ones also exceed a session and the stall timeout.
DURATIONS = (20, 60) if LONG else (5,)
SERVERS = ("kafka", "postgres") if LONG else ()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("seconds", DURATIONS)
async def test_paused_processes_lose_no_task(tmp_path, seconds):
    """W4, design's guarantees 2, 3 and 6: after a pause of any process no task is lost, no stage
    takes effect twice and no stale attempt is committed."""
    # A process ends after a pause of that length (O2a). The supervisor restarts a service, and the
    # other worker takes over the tasks of a worker.
    statuses = frozenset({0, EXIT_FAILED} if seconds >= STALL_S else {0})
    async with run_scenario(tmp_path, f"stop {seconds} s", statuses=statuses) as scenario:
        groups = scenario.groups([*SERVICES, *SERVERS, "worker"], at_once=4)
        for group in groups:

            async def inject(group: list[str] = group) -> None:
                running = scenario.deployment.processes
                running["worker"] = scenario.rng.choice(scenario.workers.running).pid
                await scenario.stop_for(seconds, *[running[victim] for victim in group])

            fault = f"SIGSTOP {', '.join(group)}, {seconds} s"
            await scenario.wave(fault, inject, tasks=TASKS // len(groups))
