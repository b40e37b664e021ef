"""The verdict of a run, on tiny suites in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
# One process, because most suites need no second one; the last value of an option counts.
_CROWD = ("--numprocesses", "1", "--dist", "loadscope", "--no-loadscope-reorder")
_HEAD = """
import os, pytest

def first(name):
    exists = os.path.exists(name)
    open(name, "w").close()
    return not exists

def test_good():
    pass
"""
_UNSTEADY = """
def test_busy():
    assert not first("busy"), "the machine was busy"

def test_killed():
    if first("killed"):
        os._exit(1)

@pytest.fixture
def left():
    yield
    if first("left"):
        raise OSError("left open")

def test_cleaned(left):
    pass

def test_twice():
    once = first("a")
    assert not once and not first("b"), "busy twice"

def test_once():
    assert not first("c"), "busy once"
    assert first("d"), "ran again"
"""


def _verdict(folder: Path, suite: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_tiny.py").write_text(_HEAD + suite)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Our other plugins take seconds to import.
    environment |= {"PYTHONPATH": str(_ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.support.verdict", "-p", "xdist", *_CROWD, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _recorded(folder: Path) -> list[tuple[str, str]]:
    record = folder / "benchmarks/results/unsteady.jsonl"
    entries = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    assert all(entry.keys() == {"time", "commit", "test", "error"} for entry in entries)
    return [(entry["test"].removeprefix("test_tiny.py::"), entry["error"]) for entry in entries]


def test_tests_that_pass_alone_are_unsteady(tmp_path: Path) -> None:
    """The run is green, names and records them, and ends with pytest's own line. A test has two
    chances alone; what passed in the first of them does not run again."""
    run = _verdict(tmp_path, _UNSTEADY, "--numprocesses", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    unsteady = [
        ("test_busy", "AssertionError: the machine was busy"),
        ("test_cleaned", "OSError: left open"),
        ("test_killed", "worker 'gw0' crashed while running 'test_tiny.py::test_killed'"),
        ("test_once", "AssertionError: busy once"),
        ("test_twice", "AssertionError: busy twice"),
    ]
    lines = re.sub(r"'gw\d+'", "'gw0'", run.stdout).splitlines()
    assert [line for line in lines if line.startswith("UNSTEADY")] == [
        f"UNSTEADY test_tiny.py::{test}: {error}" for test, error in unsteady
    ]
    assert "1 passed" in lines[-1]
    assert [test for test, _ in _recorded(tmp_path)] == [test for test, _ in unsteady]


def test_tests_that_do_not_pass_alone_are_red(tmp_path: Path) -> None:
    """A skip is no pass. The unsteady test beside them is recorded."""
    run = _verdict(
        tmp_path,
        "def test_busy():\n    assert not first('a')\n"
        "def test_never():\n    assert 1 == 2\n"
        "def test_skipped():\n    assert first('b') or pytest.skip('no')\n    assert 0\n",
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    assert "1 failed" in run.stdout.splitlines()[-1]
    assert "NOT PASSED ALONE test_tiny.py::test_never: assert 1 == 2" in run.stdout.splitlines()
    assert [test for test, _ in _recorded(tmp_path)] == ["test_busy"]


def test_a_skip_alone_is_red(tmp_path: Path) -> None:
    """pytest itself takes a run whose only test is skipped for a success."""
    run = _verdict(
        tmp_path, "def test_skipped():\n    assert first('b') or pytest.skip('no')\n    assert 0\n"
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    assert _recorded(tmp_path) == []


def test_a_run_that_ends_without_its_summary_is_red(tmp_path: Path) -> None:
    """Also if its exit status is 0."""
    run = _verdict(tmp_path, "def test_gone():\n    assert not first('a')\n    os._exit(0)\n")
    assert run.returncode != 0, run.stdout + run.stderr
    assert _recorded(tmp_path) == []


def test_more_than_ten_failures_are_red_at_once(tmp_path: Path) -> None:
    """No test runs again: so many do not fail by chance."""
    run = _verdict(
        tmp_path,
        "@pytest.mark.parametrize('number', range(11))\ndef test_many(number):\n"
        "    assert not first(str(number))\n",
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    assert "11 failed, 1 passed in" in run.stdout.splitlines()[-1]
    assert _recorded(tmp_path) == []


def test_tests_of_one_failed_fixture_are_one_failure(tmp_path: Path) -> None:
    """They run again, so that a platform that did not start once holds back nothing."""
    run = _verdict(
        tmp_path,
        "@pytest.fixture(scope='session')\ndef platform():\n    assert not first('a'), 'unhealthy'\n"
        "@pytest.mark.parametrize('number', range(12))\ndef test_many(platform, number):\n    pass\n",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "12 passed" in run.stdout.splitlines()[-1]
    assert len(_recorded(tmp_path)) == 12


@pytest.mark.parametrize(
    ("suite", "arguments"),
    [
        ("def test_busy():\n    assert not first('a')\n", ()),
        (
            "def test_killed():\n    first('a') and os._exit(1)\n",
            ("--max-worker-restart", "0"),
        ),
        ("def test_busy():\n    assert not first('a')\n", ("--numprocesses", "0", "-x")),
    ],
    ids=["module is not collected", "no process is left", "first failure ends the run"],
)
def test_a_run_that_leaves_out_tests_is_red(tmp_path: Path, suite: str, arguments: tuple[str, ...]) -> None:
    """The test that failed would pass alone, but others never ran."""
    (tmp_path / "test_z.py").write_text(
        "import os\nif 'PYTEST_XDIST_WORKER' in os.environ and not os.path.exists('restarts'):\n"
        "    raise ImportError('gone')\ndef test_bad():\n    assert 0\n"
    )
    if arguments:
        (tmp_path / "restarts").touch()
    run = _verdict(tmp_path, suite, *arguments)
    assert run.returncode != 0, run.stdout + run.stderr
    assert _recorded(tmp_path) == []


@pytest.mark.parametrize("processes", ["0", "1"])
def test_an_error_of_a_shared_fixture_is_red(tmp_path: Path, processes: str) -> None:
    """pytest charges the end of a fixture of the session to its last test, which passes alone."""
    run = _verdict(
        tmp_path,
        "@pytest.fixture(scope='session')\ndef server():\n    yield\n    raise OSError('left open')\n"
        "def test_a(server):\n    pass\ndef test_z():\n    pass\n",
        *("--numprocesses", processes),
    )
    assert run.returncode != 0, run.stdout + run.stderr
    assert _recorded(tmp_path) == []
