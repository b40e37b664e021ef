"""`penstock worker --reload`: which changes start the worker again, and how it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.waiting import wait_until_blocking

from penstock.cli import worker as verb
from penstock.cli.main import cli
from penstock.errors import CannotStart

# Writes what starts it, and how it ends.
CHILD = """
import signal, sys, time
def end(number, frame):
    print("stopped", file=open("log", "a"), flush=True)
    sys.exit()
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
print(open("shop.py").read(), file=open("log", "a"), flush=True)
time.sleep(300)
"""


def log_of(path: Path) -> list[str]:
    return (path / "log").read_text().split() if (path / "log").exists() else []


def test_a_change_right_after_the_start_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W1: the watch begins before the worker, so a worker that is ready follows its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "_command", lambda _target: (sys.executable, "-c", CHILD))
    shop = tmp_path / "shop.py"
    shop.write_text("first")
    start = subprocess.Popen

    def slow_start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        """The worker runs, and its file changes, before this process continues."""
        child = start(*words, **options)
        if shop.read_text() == "first":
            wait_until_blocking(lambda: "first" in log_of(tmp_path))
            shop.write_text("second")
        return child

    monkeypatch.setattr(subprocess, "Popen", slow_start)

    def stop_when_changed() -> None:
        until_s = time.monotonic() + 20
        while "second" not in log_of(tmp_path) and time.monotonic() < until_s:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    stopping = threading.Thread(target=stop_when_changed)
    stopping.start()
    verb._run_reloading("shop", 5.0)
    stopping.join()
    assert log_of(tmp_path) == ["first", "stopped", "second", "stopped"]


def test_an_error_of_the_module_is_shown_with_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W1: the error is the module's own, and no fault of Penstock."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaking_shop.py").write_text("def first():\n    return 1 / 0\n\nfirst()\n")
    result = CliRunner().invoke(cli, ["worker", "breaking_shop"])
    assert result.exit_code == 6
    first, *lines = result.stderr.splitlines()
    assert first.endswith("the module breaking_shop cannot be imported: ZeroDivisionError: division by zero")
    file = tmp_path / "breaking_shop.py"
    assert [line.strip() for line in lines] == [f"{file}:4, in <module>", f"{file}:2, in first"]


def test_reload_refuses_several_processes() -> None:
    """W1: an option without an effect is refused."""
    result = CliRunner().invoke(cli, ["worker", "shop", "--reload", "--processes", "2"])
    assert result.exit_code != 0
    assert "--reload runs one process" in result.output


def test_an_exit_while_the_module_is_imported_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O8: its own status may be 0, after which no supervisor starts the worker again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "module_that_exits.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(CannotStart, match="module_that_exits cannot be imported: SystemExit: 0"):
        verb.load("module_that_exits")
