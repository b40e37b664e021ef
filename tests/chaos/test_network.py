"""A worker whose link to the broker fails in each way a link does, and comes back."""

import asyncio
import random

import pytest

from tests.chaos.arena import LONG, SEED, TASKS, arena
from tests.chaos.link import link, missing

# Above a lease and a session.
DURATIONS = (20, 60) if LONG else (8,)
FAULTS = {
    "nothing gets out": {"out": 1.0},
    "nothing gets in": {"back": 1.0},
    "30 % lost each way": {"out": 0.3, "back": 0.3},
    "gone": {"out": 1.0, "back": 1.0},
}


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_link_of_a_worker_fails(tmp_path):
    """W4, design's guarantees 2, 3 and 6: a worker that cannot be heard, cannot hear or is gone loses its tasks to
    others; what it says of them once it is back changes nothing."""
    with link(random.Random(f"{SEED}/link")) as line:
        async with arena(tmp_path, "link", workers=1) as field:
            far = field.workers.start(prefix=line.prefix)
            for seconds in DURATIONS:
                faults = list(FAULTS)
                field.chance.shuffle(faults)
                # The short form draws two: after each the worker must find its way back first.
                faults = faults if LONG else faults[:2]
                for name in faults:

                    async def strike(name: str = name, seconds: int = seconds) -> None:
                        line.drop(**FAULTS[name])
                        await asyncio.sleep(seconds)
                        line.drop()

                    # Whoever is not back from the last fault could not be hit by this one.
                    await field.wave(
                        f"{name}, {seconds} s", strike, tasks=TASKS // len(FAULTS), when_working=[far.pid]
                    )
