"""Services as processes: one that stands still ends, and what it leaves behind cannot keep it."""

import asyncio
import json
import os
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


def refused(*argv, **given):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, *argv],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param({"PENSTOCK_SESSION_TIMEOUT_S": "1"}, "session_timeout_s=1.0 must be", id="a setting"),
        pytest.param(
            {"PENSTOCK_LOG_LEVEL": "LOUD"}, "PENSTOCK_LOG_LEVEL='LOUD' must be", id="of the log itself"
        ),
    ],
)
def test_settings_that_are_wrong_are_told_in_the_format_of_the_log(given, told):
    """Issue 7: whoever collects JSON finds why a service did not begin as an entry like all others; as text it is told as the
    command line tells its errors. Both with the status of wrong settings."""
    service = ("-m", "penstock", "run", "stages")
    done = refused(*service, PENSTOCK_LOG_FORMAT="json", **given)
    [line] = done.stderr.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["service"]) == ("error", "stages")
    assert told in entry["message"]
    plain = refused(*service, **given)
    assert told in plain.stderr
    assert "Traceback" not in plain.stderr
    assert (done.returncode, plain.returncode) == (6, 6)


def test_a_worker_tells_what_is_wrong_with_its_log(tmp_path):
    """Issue 7: its program is the user's, and no traceback of ours is to end it."""
    program = tmp_path / "worker.py"
    program.write_text("from penstock.worker import Worker\nWorker().run()\n")
    done = refused(str(program), PENSTOCK_LOG_FORMAT="json", PENSTOCK_LOG_LEVEL="LOUD")
    [line] = done.stderr.splitlines()
    assert "PENSTOCK_LOG_LEVEL='LOUD'" in json.loads(line)["message"]
    assert done.returncode == 6


def test_a_mark_of_the_process_before_says_nothing(tmp_path):
    """O2: a container that is started again finds its /tmp as it was; the service is not ready before it says so itself."""
    mark = tmp_path / "ready"
    mark.touch()
    program = "import asyncio, sys\nfrom penstock import process\n"
    program += "async def service(stopping, ready): sys.exit(7 if __import__('pathlib').Path(sys.argv[1]).exists() else 8)\n"
    program += "process.run('test', service)"
    assert refused("-c", program, str(mark), PENSTOCK_READY_FILE=str(mark)).returncode == 8


if __name__ == "__main__":
    services = {"stuck": stuck, "moving": moving, "haunted": haunted}
    process.LEAVE_S = 0.5
    sys.exit(process.run(sys.argv[1], services[sys.argv[1]], stall_s=1.0))
