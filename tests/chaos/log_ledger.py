"""The lines that handlers have logged, compared with those that readers of the platform see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.ledger import Execution

Document = Mapping[str, Any]
# A worker that is killed may lose so much.
LOSS_S = 0.25
DISORDERED = "lines of logs twice, out of order or missing in between"
UNMARKED = "lines of logs missing without a mark"


@dataclass
class LogCounts:
    """The result of a comparison.

    Attributes:
        lines: logged by all handlers.
        runs: with lines.
        missing: lines that no reader sees.
        oldest_s: the longest time before a kill at which a missing line was logged.
        found: violations by claim.
    """

    lines: int = 0
    runs: int = 0
    missing: int = 0
    oldest_s: float = 0.0
    found: dict[str, list[str]] = field(
        default_factory=lambda: {
            DISORDERED: [],
            "lines of logs missing without a kill": [],
            "lines of logs missing earlier than 250 ms before a kill": [],
            UNMARKED: [],
        }
    )


def place_of(execution: Execution) -> tuple[int, int, int]:
    """The place of the log of an execution: task, step and attempt."""
    return execution.task_id, execution.step, execution.attempt


def pid_of(execution: Execution) -> int:
    """The process of the worker."""
    return int(execution.worker.rsplit("-", 2)[1])


def read_lines(file: Path) -> dict[str, list[float]]:
    """When each line was logged, by the name of its execution."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for row in file.read_text().splitlines():
        name, number, at_s = row.split()
        assert int(number) == len(found[name])
        found[name].append(float(at_s))
    return found


def compare(
    executions: Iterable[Execution],
    logged: Mapping[str, list[float]],
    seen: Mapping[tuple[int, int, int], list[Document]],
    killed_s: Mapping[int, float],
    delays_s: Mapping[int, float],
) -> LogCounts:
    """Compares each execution with what readers see.

    Args:
        executions: of the ledger, with lines.
        logged: of `read_lines`.
        seen: what the API shows, by task, step and attempt.
        killed_s: when a worker was killed, by process.
        delays_s: how much longer a record took on this machine then, by process.
    """
    counts = LogCounts()
    twice, unkilled, early, unmarked = counts.found.values()
    for execution in executions:
        name, times = execution.name, logged[execution.name]
        documents = seen[place_of(execution)]
        run = next((one["run"] for one in documents if one["text"].startswith(f"{name} ")), None)
        of_run = [one for one in documents if run is not None and one["run"] == run]
        lines = [one for one in of_run if one["line"] is not None]
        texts = [one["text"] for one in lines if one["source"] != "penstock"]
        counts.lines += len(times)
        counts.runs += run is not None
        expected = [f"{name} {number}" for number in range(len(texts))]
        if texts != expected or [one["line"] for one in lines] != list(range(len(lines))):
            twice.append(name)
        missing = times[len(texts) :]
        if not missing:
            continue
        counts.missing += len(missing)
        pid = pid_of(execution)
        if pid not in killed_s:
            unkilled.append(f"{name}: {len(missing)} of {len(times)}")
            continue
        age_s = killed_s[pid] - missing[0]
        counts.oldest_s = max(counts.oldest_s, age_s)
        if age_s > LOSS_S + delays_s[pid]:
            early.append(f"{name}: {age_s:.3f} s, with a delay of {delays_s[pid]:.3f} s")
        # The platform does not know an unclaimed execution that shipped nothing.
        marks = [one for one in documents if one["line"] is None and one["run"] in (run, None)]
        if not marks and run is not None:
            unmarked.append(name)
    return counts
