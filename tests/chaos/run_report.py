"""The counts of a run of the fault tests: a table at its end, and a file after the full form."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from benchmarks.measurements import RESULTS, machine
from rich.console import Console
from rich.table import Table

from tests.chaos.ledger import WaveCounts


@dataclass(frozen=True)
class Row:
    """The counts of one fault.

    Attributes:
        scenario: name of the scenario.
        fault: name of the fault.
        tasks: number of tasks in its wave.
        counts: counts of their executions.
        seconds: from the end of the fault until all tasks had ended.
        restarts: restarts of services in the wave, due to the fault or not.
    """

    scenario: str
    fault: str
    tasks: int
    counts: WaveCounts
    seconds: float
    restarts: int

    def to_wire(self) -> dict[str, Any]:
        """The columns of the table, by heading."""
        return {
            "tasks": self.tasks,
            "executions": self.counts.executions,
            "run again": self.counts.again,
            "expired": self.counts.expired,
            "handed back": self.counts.handed_back,
            "restarts": self.restarts,
            "ended after (s)": self.seconds,
        }


@dataclass
class Run:
    """All scenarios of this run.

    Attributes:
        seed: seed of all random choices.
        rows: one row for each fault.
        broken: number of violations by invariant.
        before: state of the machine before the first scenario.
        sentences: further counts, one sentence each.
        figures: further counts by name, for the file.
    """

    seed: int = 0
    rows: list[Row] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)
    before: dict[str, Any] = field(default_factory=machine)
    sentences: list[str] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def note(self, found: Mapping[str, Sequence[object]]) -> None:
        """Adds the violations of each invariant that a scenario found."""
        self.broken.update({claim: len(offenders) for claim, offenders in found.items()})

    def add_sentence(self, sentence: str) -> None:
        """Adds a count for which the table has no column."""
        self.sentences.append(sentence)

    def print_to(self, console: Console) -> None:
        """Prints the table, the violations and the sentences."""
        columns = list(self.rows[0].to_wire())
        table = Table("scenario", "fault", *columns, title=f"faults, PENSTOCK_CHAOS_SEED={self.seed}")
        for row in self.rows:
            table.add_row(row.scenario, row.fault, *map(str, row.to_wire().values()))
        console.print(table)
        for claim, count in self.broken.items():
            console.print(f"{claim}: {count}")
        for sentence in self.sentences:
            console.print(sentence)

    def save(self, name: str, command: str) -> None:
        """Writes `benchmarks/results/<name>.json`."""
        document = {
            "benchmark": name,
            "command": command,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.before,
            "seed": self.seed,
            "figures": {f"{row.scenario}: {row.fault}": row.to_wire() for row in self.rows} | self.figures,
            "counts": self.sentences,
            "claims": {
                f"{claim}: none": {"found": str(count), "holds": count == 0}
                for claim, count in self.broken.items()
            },
        }
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")


def command(path: str = "tests/chaos") -> str:
    """The command that repeats this run, except for its races."""
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("PENSTOCK_CHAOS_")
    }
    variables["PENSTOCK_CHAOS_SEED"] = str(RUN.seed)
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), f"python -m pytest {path}"])


RUN = Run()
