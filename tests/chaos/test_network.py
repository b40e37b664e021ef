"""A worker whose link to the broker fails in each possible way and recovers."""

import asyncio
import random

import pytest

from tests.chaos.link import link, missing
from tests.chaos.scenario import LONG, SEED, TASKS, run_scenario

# Longer than a lease and a session.
DURATIONS = (20, 60) if LONG else (8,)
FAULTS = {
    "no packets out": {"out": 1.0},
    "no packets in": {"back": 1.0},
    "30 % lost each way": {"out": 0.3, "back": 0.3},
    "no packets": {"out": 1.0, "back": 1.0},
}


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_a_worker_with_a_failing_link_loses_no_task(tmp_path):
    """W4, design's guarantees 2, 3 and 6: tasks of a worker whose link fails run on other workers.
    Its late reports change nothing."""
    with link(random.Random(f"{SEED}/link")) as worker_link:
        async with run_scenario(tmp_path, "link", workers=1) as scenario:
            linked_worker = scenario.workers.start(prefix=worker_link.prefix)
            for seconds in DURATIONS:
                faults = list(FAULTS)
                scenario.rng.shuffle(faults)
                # The short form draws two, since the worker must recover after each.
                faults = faults if LONG else faults[:2]
                for name in faults:

                    async def inject(name: str = name, seconds: int = seconds) -> None:
                        worker_link.drop(**FAULTS[name])
                        await asyncio.sleep(seconds)
                        worker_link.drop()

                    # A worker that has not recovered from the last fault would not notice this one.
                    await scenario.wave(
                        f"{name}, {seconds} s",
                        inject,
                        tasks=TASKS // len(FAULTS),
                        when_working=[linked_worker.pid],
                    )
