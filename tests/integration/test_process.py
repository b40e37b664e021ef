"""Services as processes: a service with a stalled event loop ends, and a leftover task does not
delay the end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import aiohttp
import pytest

from penstock import process
from penstock.errors import KafkaUnavailable, PostgresUnavailable, SessionLost
from penstock.local.ports import choose_port
from penstock.metrics.serving import serving, stand_in
from penstock.settings import Metered


async def stuck(stopping, ready):
    """Blocks its event loop."""
    ready()
    await asyncio.sleep(0.1)
    time.sleep(600)  # noqa: ASYNC251 (the stall under test)


async def progressing(stopping, ready):
    """Runs longer than the stall limit, while its event loop keeps running."""
    ready()
    await asyncio.sleep(1.5)


async def leaking(stopping, ready):
    """Returns, and leaves a task behind that ignores cancellation."""

    async def ignore_cancellation():
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    leaked_tasks.append(asyncio.create_task(ignore_cancellation()))
    await asyncio.sleep(0.1)


leaked_tasks: list[asyncio.Task[None]] = []


@pytest.mark.parametrize(
    ("name", "status", "expected_text"),
    [("stuck", 1, "in stuck"), ("progressing", 0, ""), ("leaking", 0, "leaving it")],
)
def test_a_stalled_process_ends_with_status_1(name, status, expected_text):
    """O2a: a process with a stalled event loop ends with status 1 and prints the stack. A leftover
    task does not delay the end."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_process", name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert expected_text in done.stderr


def run_python(*argv, **settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, *argv],
        env={**environment, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"PENSTOCK_SESSION_TIMEOUT_S": "1"}, "PENSTOCK_SESSION_TIMEOUT_S=1.0 must be", id="a setting"
        ),
        pytest.param({"PENSTOCK_LOG_LEVEL": "LOUD"}, "PENSTOCK_LOG_LEVEL='LOUD' must be", id="a log setting"),
    ],
)
def test_wrong_settings_are_logged_in_the_log_format(settings, message):
    """O4: a service with wrong settings writes one JSON entry or one line of text, and ends
    with status 6."""
    service = ("-m", "penstock", "run", "stages")
    done = run_python(*service, PENSTOCK_LOG_FORMAT="json", **settings)
    [line] = done.stderr.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["service"]) == ("error", "stages")
    assert message in entry["error"]
    plain = run_python(*service, **settings)
    assert message in plain.stderr
    assert "Traceback" not in plain.stderr
    assert (done.returncode, plain.returncode) == (6, 6)


def test_a_worker_reports_a_wrong_log_setting(tmp_path):
    """O4: a worker program with a wrong log setting writes one entry without a traceback, and
    ends with status 6."""
    program = tmp_path / "worker.py"
    program.write_text("from penstock.worker import Worker\nWorker().run()\n")
    done = run_python(str(program), PENSTOCK_LOG_FORMAT="json", PENSTOCK_LOG_LEVEL="LOUD")
    [line] = done.stderr.splitlines()
    assert "PENSTOCK_LOG_LEVEL='LOUD'" in json.loads(line)["error"]
    assert done.returncode == 6


def test_the_ready_file_of_an_earlier_process_is_removed(tmp_path):
    """O2: a restarted container finds its old /tmp. The service removes the old ready file until it
    is ready."""
    ready_file = tmp_path / "ready"
    ready_file.touch()
    program = "import asyncio, sys\nfrom penstock import process\n"
    program += "async def service(stopping, ready): sys.exit(7 if __import__('pathlib').Path(sys.argv[1]).exists() else 8)\n"
    program += "process.run('test', service)"
    assert run_python("-c", program, str(ready_file), PENSTOCK_READY_FILE=str(ready_file)).returncode == 8


OUTAGE = [PostgresUnavailable("no server"), KafkaUnavailable("no broker"), SessionLost("it ended")]


@pytest.mark.parametrize("error", OUTAGE)
async def test_a_service_begins_again_after_an_outage(error, tmp_path, monkeypatch):
    """O2: a service that lacks a server, or loses a session, begins again in its process. It is not
    ready meanwhile, and its metrics server answers with the reason."""
    ready_file = tmp_path / "ready"
    monkeypatch.setenv(process.READY_VARIABLE, str(ready_file))
    settings = Metered(metrics_port=choose_port(0))
    attempts, waits = 0, []

    async def service(stopping, ready):
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            ready()
            assert ready_file.exists()
        if attempts < 4:
            raise error
        async with serving(settings, "test", lambda: (), {}):
            assert (await page("/readyz"))["status"] == "ready"
        stopping.set()

    async def page(path):
        url = f"http://127.0.0.1:{settings.metrics_port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return await response.json()

    async def wait(why):
        await stand_in(settings, "test", why)
        assert (await page("/livez"))["status"] == "ok"
        document = await page("/readyz")
        waits.append((document["status"], *document["checks"].values()))
        assert not ready_file.exists()

    assert await process._supervise("test", service, 60.0, wait) == 0
    assert waits == [("not ready", str(error))] * 3


async def test_a_worker_begins_again_only_until_it_is_ready():
    """O2, W1: handlers in threads may outlive a worker, so its process ends with it."""
    attempts = 0

    async def worker(_stopping, ready):
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            ready()
        raise KafkaUnavailable("no broker")

    assert await process._supervise("worker", worker, 60.0, resumes=False) == 5
    assert attempts == 2


async def draining(stopping, ready):
    """Drains until standard input has a line."""
    ready()
    print("ready", flush=True)
    await stopping.wait()
    await asyncio.to_thread(sys.stdin.readline)


@pytest.mark.parametrize(("repeat_s", "status"), [(3600.0, 0), (0.0, process.EXIT_FORCED)])
def test_only_a_second_signal_that_is_no_repetition_ends_the_drain(repeat_s, status):
    """O11: `timeout` signals a process twice at once, which counts as one signal. A later signal
    ends the process without a drain."""
    service = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.test_process", "draining", str(repeat_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    service.stdout.readline()
    service.send_signal(signal.SIGTERM)
    while "event=process_stopping" not in service.stderr.readline():
        pass
    service.send_signal(signal.SIGTERM)
    # The drain ends with the line, unless the signal ends the process.
    _output, errors = service.communicate(None if status else "done\n")
    assert (service.returncode, "event=process_forced" in errors) == (status, status != 0)


async def hurrying(stopping, ready):
    """Drains until it is hurried."""
    ready()
    print("ready", flush=True)
    await stopping.wait()
    await asyncio.to_thread(hurried.wait)


hurried = threading.Event()


def test_a_second_signal_hurries_a_worker():
    """W1: the second signal ends the drain, and the process ends in order."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.test_process", "hurrying", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    worker.stdout.readline()
    worker.send_signal(signal.SIGTERM)
    while "event=process_stopping" not in worker.stderr.readline():
        pass
    worker.send_signal(signal.SIGTERM)
    _output, errors = worker.communicate()
    assert worker.returncode == 0
    assert "event=drain_ended" in errors
    assert "event=process_forced" not in errors


if __name__ == "__main__":
    services = {
        "hurrying": hurrying,
        "stuck": stuck,
        "progressing": progressing,
        "leaking": leaking,
        "draining": draining,
    }
    process.EXIT_TIMEOUT_S = 0.5
    if len(sys.argv) > 2:
        process.REPEAT_S = float(sys.argv[2])
    hurry = hurried.set if sys.argv[1] == "hurrying" else None
    sys.exit(process.run(sys.argv[1], services[sys.argv[1]], stall_s=1.0, hurry=hurry))
