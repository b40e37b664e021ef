"""Services as processes: one that stands still ends, and what it leaves behind cannot keep it."""

import asyncio
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from penstock import process


async def stuck(stopping, ready):
    """Its loop stands still."""
    ready()
    await asyncio.sleep(0.1)
    time.sleep(600)  # noqa: ASYNC251 (that is the fault)


async def moving(stopping, ready):
    """Is done in a while that is longer than its loop may stand still, and moves all the time."""
    ready()
    await asyncio.sleep(1.5)


async def haunted(stopping, ready):
    """Ends, and leaves a task behind that nothing ends."""

    async def ghost():
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    stays.append(asyncio.create_task(ghost()))
    await asyncio.sleep(0.1)


stays: list[asyncio.Task[None]] = []


@pytest.mark.parametrize(
    ("name", "status", "words"), [("stuck", 1, "in stuck"), ("moving", 0, ""), ("haunted", 0, "leaving it")]
)
def test_a_process_ends_when_it_should_and_not_before(name, status, words):
    """O2a: alive but not progressing is a failure; the stack tells where. What is left behind is left."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_process", name],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    assert words in done.stderr


if __name__ == "__main__":
    services = {"stuck": stuck, "moving": moving, "haunted": haunted}
    process.LEAVE_S = 0.5
    sys.exit(process.run(sys.argv[1], services[sys.argv[1]], stall_s=1.0))
