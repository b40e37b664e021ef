"""The supervisor, with real processes and real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from tests.waiting import wait_until

from penstock.core.restart import RestartPolicy
from penstock.errors import NotFound
from penstock.local.supervisor import Program, Supervisor

QUICK = RestartPolicy(first_s=0.1, factor=2, longest_s=1, steady_s=60)
FOREVER = "import time\nwhile True: time.sleep(60)"
SERVE = f"import os, pathlib\npathlib.Path(os.environ['PENSTOCK_READY_FILE']).touch()\n{FOREVER}"


def program(name: str, script: str, **given) -> Program:
    return Program(name=name, argv=(sys.executable, "-c", script), **given)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def supervisor(lines, tmp_path):
    made = Supervisor(lambda name, line: lines.append((name, line)), run_dir=tmp_path / "run", policy=QUICK)
    yield made
    made.close()


async def test_a_killed_program_is_started_again(supervisor, lines):
    """O1: kill -9 of a program brings a new process, and its ready mark goes until the new one puts its own."""
    supervisor.start(program("stages", SERVE))
    await wait_until(lambda: supervisor.is_ready("stages"))
    killed = supervisor.kill("stages")
    await wait_until(lambda: supervisor.processes().get("stages", killed) != killed)
    await wait_until(lambda: supervisor.is_ready("stages"))
    assert ("stages", "killed by SIGKILL; starting it again in 0.1 s") in lines
    assert supervisor.exits("stages") == 1


async def test_a_program_that_keeps_dying_is_started_ever_later(supervisor, lines):
    """The delay doubles each time, up to the longest."""
    supervisor.start(program("stages", "import sys; sys.exit(3)"))
    await wait_until(lambda: supervisor.exits("stages") >= 5)
    announced = [float(line.split()[-2]) for _, line in lines if "starting it again" in line]
    assert announced[:5] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert lines[0] == ("stages", "ended with status 3; starting it again in 0.1 s")


async def test_what_cannot_be_started_is_said_and_tried_again(supervisor, lines):
    """A missing executable is a remark in the log, not the end of the supervisor."""
    supervisor.start(Program(name="stages", argv=("/nowhere/to/be/found",)))
    await wait_until(lambda: supervisor.exits("stages") >= 2)
    assert "cannot be started" in lines[0][1]
    with pytest.raises(NotFound, match="stages is not running now"):
        supervisor.kill("stages")


async def test_stopping_goes_by_order(supervisor, lines):
    """The gateway has ended before the stage processor is asked, and both before the database."""
    script = (
        f"import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(print('bye')))\nprint('up')\n{FOREVER}"
    )
    for name, order in (("postgres", 9), ("stages", 1), ("gateway", 0)):
        supervisor.start(program(name, script, order=order))
    await wait_until(lambda: sum(line == "up" for _, line in lines) == 3)
    supervisor.stop_all()
    assert [name for name, line in lines if line == "bye"] == ["gateway", "stages", "postgres"]
    assert supervisor.processes() == {}


async def test_what_ignores_the_request_is_killed_after_its_grace(supervisor, lines):
    """A stop never hangs."""
    script = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\n{FOREVER}"
    supervisor.start(program("stages", script, grace_s=0.2))
    await wait_until(lambda: ("stages", "up") in lines)
    pid = supervisor.processes()["stages"]
    supervisor.stop("stages")
    assert not psutil.pid_exists(pid)
    assert ("stages", "did not stop within 0 s: killing it") in lines


async def test_descendants_end_with_their_program(supervisor, lines):
    """A child that a killed program leaves behind must not keep its ports from its successor."""
    script = (
        f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {FOREVER!r}]).pid)\n{FOREVER}"
    )
    supervisor.start(program("stages", script))
    child = int((await wait_until(lambda: lines))[0][1])
    supervisor.kill("stages")
    await wait_until(lambda: not _runs(child))


async def test_a_killed_supervisor_leaves_nobody_behind(tmp_path):
    """Kill -9 of the supervising process: its reaper stops every program, with its own signal, in order."""
    heard = tmp_path / "heard"
    child = (
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGINT, lambda *_: (open({str(heard)!r}, 'a').write(sys.argv[1]), os._exit(0)))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(60)"
    )
    script = textwrap.dedent(f"""
        import signal, sys, time
        from pathlib import Path
        from penstock.local.supervisor import Program, Supervisor
        supervisor = Supervisor(lambda _name, line: print(line, flush=True), run_dir=Path({str(tmp_path)!r}))
        for name, order in (("b", 1), ("a", 0)):
            argv = (sys.executable, "-c", {child!r}, name)
            supervisor.start(Program(name=name, argv=argv, order=order, stop_signal=signal.SIGINT))
        time.sleep(60)
    """)
    # Blocking is fine: nothing else runs in this test's loop.
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:  # noqa: ASYNC220
        assert owner.stdout is not None
        children = [int(owner.stdout.readline()) for _ in range(2)]
        owner.kill()
    for pid in children:
        await wait_until(lambda pid=pid: not _runs(pid))
    await wait_until(lambda: heard.read_text() == "ab")


async def test_a_killed_reaper_is_replaced(supervisor, lines, tmp_path):
    """The next change of processes finds the reaper gone and starts another that knows everything."""
    supervisor.start(program("stages", SERVE))
    await wait_until(lambda: supervisor.is_ready("stages"))
    first = supervisor._reaper._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    supervisor.start(program("gateway", SERVE))
    await wait_until(lambda: supervisor.is_ready("gateway"))
    second = supervisor._reaper._process
    assert second.pid != first.pid
    assert second.poll() is None


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
