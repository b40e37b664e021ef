"""The supervisor, with real processes and real signals."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import psutil
import pytest
from tests.support.waiting import wait_until

from penstock.core.restart import RestartPolicy
from penstock.errors import NotFound
from penstock.local.supervisor import Program, Supervisor

QUICK = RestartPolicy(first_s=0.1, factor=2, longest_s=1, steady_s=60)
SLEEP_LOOP = "import time\nwhile True: time.sleep(60)"
SERVE = f"import os, pathlib\npathlib.Path(os.environ['PENSTOCK_READY_FILE']).touch()\n{SLEEP_LOOP}"


def program(name: str, script: str, **fields) -> Program:
    return Program(name=name, argv=(sys.executable, "-c", script), **fields)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def supervisor(lines, tmp_path):
    made = Supervisor(lambda name, line: lines.append((name, line)), run_dir=tmp_path / "run", policy=QUICK)
    yield made
    made.close()


async def test_a_killed_program_is_restarted(supervisor, lines):
    """O1: after kill -9 a new process starts, and the ready file is absent until it serves."""
    supervisor.start(program("stages", SERVE))
    await wait_until(lambda: supervisor.is_ready("stages"))
    killed = supervisor.kill("stages")
    await wait_until(lambda: supervisor.processes().get("stages", killed) != killed)
    await wait_until(lambda: supervisor.is_ready("stages"))
    assert ("stages", "killed by SIGKILL; restarting it in 0.1 s") in lines
    assert supervisor.exits("stages") == 1


async def test_restarts_back_off(supervisor, lines):
    """The delay doubles each time, up to its maximum."""
    supervisor.start(program("stages", "import sys; sys.exit(3)"))
    await wait_until(lambda: supervisor.exits("stages") >= 5)
    announced = [float(line.split()[-2]) for _, line in lines if "restarting it" in line]
    assert announced[:5] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert lines[0] == ("stages", "ended with status 3; restarting it in 0.1 s")


async def test_a_failed_start_is_logged_and_retried(supervisor, lines):
    """A missing executable is logged and does not end the supervisor."""
    supervisor.start(Program(name="stages", argv=("/nowhere/to/be/found",)))
    await wait_until(lambda: supervisor.exits("stages") >= 2)
    assert "cannot be started" in lines[0][1]
    with pytest.raises(NotFound, match="stages does not run now"):
        supervisor.kill("stages")


async def test_programs_stop_in_order(supervisor, lines):
    """The gateway ends before the stage processor gets its signal, and both before the database."""
    script = f"import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(print('bye')))\nprint('up')\n{SLEEP_LOOP}"
    for name, order in (("postgres", 9), ("stages", 1), ("gateway", 0)):
        supervisor.start(program(name, script, order=order))
    await wait_until(lambda: sum(line == "up" for _, line in lines) == 3)
    supervisor.stop_all()
    assert [name for name, line in lines if line == "bye"] == ["gateway", "stages", "postgres"]
    assert supervisor.processes() == {}


async def test_a_program_is_killed_after_its_grace_period(supervisor, lines):
    """A program that ignores its signal does not block the stop."""
    script = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\n{SLEEP_LOOP}"
    supervisor.start(program("stages", script, grace_s=0.2))
    await wait_until(lambda: ("stages", "up") in lines)
    process = psutil.Process(supervisor.processes()["stages"])
    supervisor.stop("stages")
    assert not process.is_running()
    assert ("stages", "did not stop within 0 s: killing it") in lines


async def test_descendants_end_with_their_program(supervisor, lines):
    """An orphaned child must not keep the ports that the next start needs."""
    script = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {SLEEP_LOOP!r}]).pid)\n{SLEEP_LOOP}"
    supervisor.start(program("stages", script))
    child = psutil.Process(int((await wait_until(lambda: lines))[0][1]))
    supervisor.kill("stages")
    await wait_until(lambda: not _runs(child))


async def test_a_killed_supervisor_leaves_no_program_running(tmp_path):
    """After kill -9 of the supervisor, its reaper stops every program by its signal, in order."""
    signal_log = tmp_path / "heard"
    child_script = (
        "import os, signal, sys, time\n"
        f"signal.signal(signal.SIGINT, lambda *_: (open({str(signal_log)!r}, 'a').write(sys.argv[1]), os._exit(0)))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(60)"
    )
    script = textwrap.dedent(f"""
        import signal, sys, time
        from pathlib import Path
        from penstock.local.supervisor import Program, Supervisor
        supervisor = Supervisor(lambda _name, line: sys.stderr.write(line + "\\n"), run_dir=Path({str(tmp_path)!r}))
        for name, order in (("b", 1), ("a", 0)):
            argv = (sys.executable, "-c", {child_script!r}, name)
            supervisor.start(Program(name=name, argv=argv, order=order, stop_signal=signal.SIGINT))
        time.sleep(60)
    """)
    # Blocking is fine: nothing else runs in this test's loop.
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as owner:  # noqa: ASYNC220
        assert owner.stderr is not None
        # Each line is one write, because threads of the supervisor write at the same time.
        children = [psutil.Process(int(owner.stderr.readline())) for _ in range(2)]
        owner.kill()
    for child in children:
        await wait_until(lambda child=child: not _runs(child))
    await wait_until(lambda: signal_log.read_text() == "ab")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
