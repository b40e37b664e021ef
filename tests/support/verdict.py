"""The verdict of a whole run: tests that failed in the crowd run again, alone.

`python -m tests.support.verdict ARGUMENTS` runs pytest with the arguments. Tests that failed, or
whose process died, run again when all others are done: in one process, at most twice. A test that
passes then is *unsteady*. It is printed and recorded in `benchmarks/results/unsteady.jsonl`, and
the run is green. The run is red when a test fails alone, too, or when more than ten tests failed.
The tests whose set-up fails for the same reason count as one: a fixture that they share has failed.

Fails closed. The run is also red when a test did not run at all, or a module cannot be collected.
It is red when a fixture of several tests fails at its end, because pytest charges that to any test.
It is red when pytest is interrupted, or its process dies in a rerun.
"""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

MOST_FAILURES = 10
# So many tests run again at most, which a few fixtures may have failed.
MOST_RERUN = 100
RERUNS = 2
RECORD = Path("benchmarks/results/unsteady.jsonl")
# Marks the report of a fixture that several tests share.
_SHARED = ("verdict", "shared fixture")
_shared_code: set[CodeType] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option by which a run and its reruns share what they saw."""
    parser.addoption("--verdict-file", type=Path, help="outcomes of the run and of its reruns, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Notes the outcomes in the process that the user started; xdist sends it all reports."""
    if not hasattr(config, "workerinput") and (file := config.getoption("verdict_file")) is not None:
        config.pluginmanager.register(Outcomes(file))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Notes the code of fixtures whose scope is wider than a test."""
    if fixturedef.scope != "function" and (
        code := getattr(inspect.unwrap(fixturedef.func), "__code__", None)
    ):
        _shared_code.add(code)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Marks a teardown error of such a fixture."""
    report = yield
    frames = call.excinfo.traceback if call.when == "teardown" and call.excinfo is not None else ()
    if report.failed and _shared_code.intersection(entry.frame.code.raw for entry in frames):
        report.user_properties.append(_SHARED)
    return report


class Outcomes:
    """The plugin: the failures of the first run, and which of these tests passed since.

    Attributes:
        failures: the first line of the error, by node id.
        causes: node ids, and the set-ups that several of these tests have in common.
        passed: tests that passed in the latest run in which they ran.
        is_whole: whether each test of the first run ran, and each failure is that of a test.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_rerun = file.exists()
        seen = json.loads(file.read_text(encoding="utf-8")) if self._is_rerun else {}
        self.failures: dict[str, str] = seen.get("failures", {})
        self.causes: set[str] = set(seen.get("causes", ()))
        self.passed: set[str] = set(seen.get("passed", ()))
        self.is_whole: bool = seen.get("is_whole", True)
        self._passed_before = frozenset(self.passed)
        self._failed: set[str] = set()
        self._collected: set[str] = set()
        self._ran: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """A rerun has the tests that have not passed. pytest's own `--last-failed` misses a test
        whose process died, when another process ran it once more."""
        if self._is_rerun:
            left = self.failures.keys() - self.passed
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in left])
            items[:] = [item for item in items if item.nodeid in left]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The tests of a run in one process."""
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """The tests of a run in several processes."""
        self._collected.update(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module whose tests are unknown."""
        self.is_whole &= not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test; a test whose process died has one report, a failure."""
        self._ran.add(report.nodeid)
        if report.failed:
            self._failed.add(report.nodeid)
            self.is_whole &= tuple(_SHARED) not in map(tuple, report.user_properties)
            if not self._is_rerun and report.nodeid not in self.failures:
                line = self.failures[report.nodeid] = _first_line(report)
                file = report.nodeid.partition("::")[0]
                self.causes.add(f"{file}: {line}" if report.when == "setup" else report.nodeid)
        # Reports of subtests are of a class of their own.
        elif report.when == "call" and report.passed and type(report) is pytest.TestReport:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Hands the outcomes to the runner and to the next rerun."""
        self.passed = (self.passed & self.failures.keys()) - self._failed
        self.is_whole &= self._collected <= self._ran
        outcomes = {
            "failures": self.failures,
            "causes": sorted(self.causes),
            "passed": sorted(self.passed),
            "is_whole": self.is_whole,
        }
        self._file.write_text(json.dumps(outcomes), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the verdicts of a rerun above pytest's own last line."""
        if not self._is_rerun:
            return
        for node_id, error in sorted(self.failures.items()):
            if node_id not in self.passed:
                terminalreporter.write_line(f"NOT PASSED ALONE {node_id}: {error}")
            elif node_id not in self._passed_before:
                terminalreporter.write_line(f"UNSTEADY {node_id}: {error}")


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
    return lines[0] if lines else "no message"


def main(arguments: list[str]) -> int:
    """Runs pytest and its reruns; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="penstock-verdict-") as folder:
        outcomes = Path(folder) / "outcomes.json"
        run = [sys.executable, "-m", "pytest", "-p", __spec__.name, f"--verdict-file={outcomes}", *arguments]
        status = _pytest(run)
        seen = _read(outcomes)
        failures = seen["failures"]
        too_many = len(seen["causes"]) > MOST_FAILURES or len(failures) > MOST_RERUN
        if not seen["is_whole"] or not failures or too_many:
            return status or (pytest.ExitCode.OK if seen["is_whole"] and not failures else _FAILED)
        if status != _FAILED:
            return status or _FAILED
        for _ in range(RERUNS):
            print(f"{len(_left(seen))} failed: each runs again, alone", flush=True)
            # The last value of an option is the one that counts.
            status = _pytest([*run, "--numprocesses", "0"])
            seen = _read(outcomes)
            if status != _FAILED or not _left(seen):
                break
        record({node_id: failures[node_id] for node_id in seen["passed"]})
        # A test that is skipped alone has not passed.
        return status or (_FAILED if _left(seen) or not seen["is_whole"] else pytest.ExitCode.OK)


_FAILED = pytest.ExitCode.TESTS_FAILED


def _pytest(arguments: list[str]) -> int:
    """Runs pytest. It ends with its cleanup when this process is asked to end."""
    # Before the child exists: a signal would end this process without it.
    signal.signal(signal.SIGINT, lambda _signal, _frame: None)  # Ctrl-C goes to pytest, too.
    children: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda _signal, _frame: [child.terminate() for child in children])
    with subprocess.Popen(arguments) as child:
        children.append(child)
        return child.wait()


def _read(outcomes: Path) -> dict[str, Any]:
    """The outcomes so far; a first run whose process died has none, and is not whole."""
    if not outcomes.exists():
        return {"failures": {}, "causes": [], "passed": [], "is_whole": False}
    seen: dict[str, Any] = json.loads(outcomes.read_text(encoding="utf-8"))
    return seen


def _left(seen: dict[str, Any]) -> set[str]:
    return set(seen["failures"]) - set(seen["passed"])


def record(unsteady: dict[str, str]) -> None:
    """Appends unsteady tests to the record, with time and commit."""
    if not unsteady:
        return
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip() or "unknown",
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    with RECORD.open("a", encoding="utf-8") as file:
        for node_id, error in sorted(unsteady.items()):
            file.write(json.dumps({**about, "test": node_id, "error": error}) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
