"""The verdict of a whole run: tests that failed in the crowd run again, alone.

`python -m tests.support.verdict ARGUMENTS` runs pytest with the arguments. Tests that failed, or
whose process died, run again when all others are done: in one process, at most twice. A test that
passes then is *unsteady*. It is printed and recorded in `benchmarks/results/unsteady.jsonl`, and
the run is green. The run is red when a test fails alone, too, or when more than ten tests failed.

Fails closed: the run is red, too, when pytest ends without a verdict, such as by an error of
collection, by an interruption, or because its process died in a rerun.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

MOST_FAILURES = 10
RERUNS = 2
RECORD = Path("benchmarks/results/unsteady.jsonl")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option by which a run and its reruns share what they saw."""
    parser.addoption("--verdict-file", type=Path, help="outcomes of the run and of its reruns, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Notes the outcomes in the process that the user started; xdist sends it all reports."""
    if not hasattr(config, "workerinput") and (file := config.getoption("verdict_file")) is not None:
        config.pluginmanager.register(Outcomes(file))


class Outcomes:
    """The plugin: the failures of the first run, and which of these tests passed since.

    Attributes:
        failures: the first line of the error, by node id.
        passed: tests that passed in the latest run in which they ran.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_rerun = file.exists()
        seen = json.loads(file.read_text(encoding="utf-8")) if self._is_rerun else {}
        self.failures: dict[str, str] = seen.get("failures", {})
        self.passed: set[str] = set(seen.get("passed", ()))
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test; a test whose process died has one report, a failure."""
        if report.failed:
            self._failed.add(report.nodeid)
            if not self._is_rerun:
                self.failures.setdefault(report.nodeid, _first_line(report))
        elif report.when == "call" and report.passed and report.nodeid in self.failures:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Hands the outcomes to the runner and to the next rerun."""
        self.passed -= self._failed
        self._file.write_text(
            json.dumps({"failures": self.failures, "passed": sorted(self.passed)}), encoding="utf-8"
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the unsteady tests above pytest's own last line."""
        for node_id in sorted(self.passed):
            terminalreporter.write_line(f"UNSTEADY {node_id}: {self.failures[node_id]}")


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
    return lines[0] if lines else "no message"


def main(arguments: list[str]) -> int:
    """Runs pytest and its reruns; returns the exit status."""
    # pytest receives the same Ctrl-C, and ends with its cleanup.
    signal.signal(signal.SIGINT, lambda _signal, _frame: None)
    with tempfile.TemporaryDirectory(prefix="penstock-verdict-") as folder:
        outcomes = Path(folder) / "outcomes.json"
        run = [sys.executable, "-m", "pytest", "-p", __spec__.name, f"--verdict-file={outcomes}"]
        run += ["-o", f"cache_dir={folder}/cache", *arguments]
        status = subprocess.run(run, check=False).returncode
        seen = _read(outcomes)
        if not outcomes.exists():
            return status or pytest.ExitCode.INTERNAL_ERROR
        if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(seen["failures"]) <= MOST_FAILURES:
            return status
        # The last value of an option is the one that counts.
        rerun = [*run, "--numprocesses", "0", "--last-failed", "--last-failed-no-failures", "none"]
        for _ in range(RERUNS):
            print(f"{len(_left(seen))} failed: each runs again, alone", flush=True)
            status = subprocess.run(rerun, check=False).returncode
            seen = _read(outcomes)
            if not _left(seen) or status != pytest.ExitCode.TESTS_FAILED:
                break
        record({node_id: seen["failures"][node_id] for node_id in seen["passed"]})
        # A test that is skipped alone has not passed.
        return status or (pytest.ExitCode.TESTS_FAILED if _left(seen) else pytest.ExitCode.OK)


def _read(outcomes: Path) -> dict[str, Any]:
    """The outcomes so far; none after a first run whose process died."""
    if not outcomes.exists():
        return {"failures": {}, "passed": []}
    seen: dict[str, Any] = json.loads(outcomes.read_text(encoding="utf-8"))
    return seen


def _left(seen: dict[str, Any]) -> set[str]:
    return set(seen["failures"]) - set(seen["passed"])


def record(unsteady: dict[str, str]) -> None:
    """Appends unsteady tests to the record, with time and commit."""
    if not unsteady:
        return
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
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
