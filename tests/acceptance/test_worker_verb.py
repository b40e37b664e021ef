"""`penstock worker`: modules as workers, in several processes, started again on a change."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from contextlib import suppress

import pytest

from penstock.local.ports import choose_port
from tests.support.scraping import scrape
from tests.support.services import make_topics
from tests.support.waiting import in_time

MODULE = """
import os
from penstock.worker import Done, Worker

print("imported version {version} by", os.getpid(), flush=True)
worker = Worker()


@worker.stage("order.reserve")
async def reserve(task):
    return Done()
"""


@pytest.fixture
async def start(kafka_servers, prefix, tmp_path):
    """Starts `penstock worker` in a directory with the module `shop`."""
    await make_topics(kafka_servers, prefix)
    (tmp_path / "shop.py").write_text(MODULE.format(version=1))
    started = []

    async def start(*words, **environment):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", "worker", *words),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            # A group of its own, which ends as a whole.
            start_new_session=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "PENSTOCK_KAFKA": kafka_servers,
                "PENSTOCK_PREFIX": prefix,
                "PENSTOCK_OBJECTS": "memory:///",
                **environment,
            },
        )
        started.append(process)
        return process

    yield start
    for process in started:
        # Also its children: `wait` would wait for those that have its output open.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def lines_with(process, *wanted):
    """Reads output until it has had each text as often as wanted, in any order; returns all."""
    lines = []
    while any(sum(text in line for line in lines) < count for text, count in wanted):
        line = (await in_time(process.stdout.readline())).decode()
        assert line, f"the process ended without {wanted}: {lines}"
        lines.append(line)
    return lines


async def test_a_module_runs_as_a_worker_until_a_signal(start):
    """W1: the module needs no call of `run`, and is found from the current directory."""
    process = await start("shop:worker")
    await lines_with(process, ("process_ready", 1))
    process.send_signal(signal.SIGTERM)
    assert await in_time(process.wait()) == 0


async def test_several_processes_run_and_are_started_again(start):
    """W1, O1: each process is a worker; one that dies is started again, and a signal stops all."""
    process = await start("shop", "--processes", "2")
    # The first import only checks the module.
    lines = await lines_with(process, ("imported", 3), ("process_ready", 2))
    first, second = (int(line.split()[-1]) for line in lines if "imported" in line and "worker-" in line)
    os.kill(first, signal.SIGKILL)
    lines = await lines_with(process, ("imported", 1), ("process_ready", 1))
    [third] = (int(line.split()[-1]) for line in lines if "imported" in line)
    process.send_signal(signal.SIGTERM)
    await lines_with(process, ("process_stopped", 2))
    assert await in_time(process.wait()) == 0
    for pid in (second, third):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_changed_file_starts_the_worker_again(start, tmp_path):
    """W1: for development, the worker follows its files."""
    process = await start("shop", "--reload")
    await lines_with(process, ("process_ready", 1))
    (tmp_path / "shop.py").write_text(MODULE.format(version=2))
    await lines_with(process, ("imported version 2", 1))
    await lines_with(process, ("process_ready", 1))
    process.send_signal(signal.SIGINT)
    await lines_with(process, ("process_stopped", 1))
    await in_time(process.wait())


async def test_a_wrong_module_is_named(start, tmp_path):
    """O8: the error says what is missing and what to write."""
    (tmp_path / "empty.py").write_text("worker = 1")
    (tmp_path / "importing.py").write_text("import missing_package")
    (tmp_path / "running.py").write_text(MODULE.format(version=1) + "\nworker.run()")
    expected = {
        "nowhere": "there is no module 'nowhere'",
        "shop:other": "it has worker",
        "shop.py": "give its module, such as shop:worker",
        "empty": "it has no Worker",
        "importing": "No module named 'missing_package'",
        "running": "if __name__ == '__main__'",
    }
    processes = [await start(words) for words in expected]
    for process, (words, text) in zip(processes, expected.items(), strict=True):
        output, _ = await in_time(process.communicate())
        assert process.returncode != 0, words
        assert text in output.decode()


async def test_each_process_has_metrics_on_a_port_of_its_own(start, tmp_path):
    """O4: they count from PENSTOCK_WORKER_METRICS_PORT; a module that fixes the port is refused."""
    port = two_ports()
    process = await start("shop:worker", "--processes", "2", PENSTOCK_WORKER_METRICS_PORT=str(port))
    await lines_with(process, ("process_ready", 2))
    for each in (port, port + 1):
        assert (await scrape(each))["penstock_worker_running", "reserve", "order"] == 0
    process.send_signal(signal.SIGTERM)
    assert await in_time(process.wait()) == 0
    fixed = MODULE.format(version=2).replace("Worker()", f"Worker(worker_metrics_port={port})")
    (tmp_path / "fixed.py").write_text(fixed)
    process = await start("fixed:worker", "--processes", "2")
    await lines_with(process, ("set PENSTOCK_WORKER_METRICS_PORT instead", 1))
    assert await in_time(process.wait()) == 6


def two_ports():
    """The first of two ports that are free, one behind the other."""
    while True:
        port = choose_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port
