"""What a run of the fault tests has counted: a table at its end, and a file for the record after the full form."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from benchmarks.figures import RESULTS, machine
from rich.console import Console
from rich.table import Table

from tests.chaos.ledger import Figures


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        scenario: whose.
        fault: its name.
        tasks: that were sent through it.
        counted: of their executions.
        seconds: from the fault's end until all of them had ended.
        restarts: how often a service ended and was started again meanwhile, by the fault or by itself.
    """

    scenario: str
    fault: str
    tasks: int
    counted: Figures
    seconds: float
    restarts: int

    def to_wire(self) -> dict[str, Any]:
        """Its columns."""
        return {
            "tasks": self.tasks,
            "executions": self.counted.executions,
            "run again": self.counted.again,
            "expired": self.counted.expired,
            "handed back": self.counted.handed_back,
            "restarts": self.restarts,
            "ended after (s)": self.seconds,
        }


@dataclass
class Run:
    """All scenarios of this run.

    Attributes:
        seed: of every draw.
        rows: one a fault.
        broken: offenders by invariant; 0 where it held.
        before: the machine, as it was before the first scenario.
        said: further counts, a sentence each.
    """

    seed: int = 0
    rows: list[Row] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)
    before: dict[str, Any] = field(default_factory=machine)
    said: list[str] = field(default_factory=list)

    def note(self, found: Mapping[str, Sequence[object]]) -> None:
        """What a scenario found of each invariant."""
        self.broken.update({claim: len(offenders) for claim, offenders in found.items()})

    def say(self, sentence: str) -> None:
        """A count that the table has no column for."""
        self.said.append(sentence)

    def tell(self, console: Console) -> None:
        """Prints the table and the invariants."""
        columns = list(self.rows[0].to_wire())
        table = Table("scenario", "fault", *columns, title=f"faults, PENSTOCK_CHAOS_SEED={self.seed}")
        for row in self.rows:
            table.add_row(row.scenario, row.fault, *map(str, row.to_wire().values()))
        console.print(table)
        for claim, count in self.broken.items():
            console.print(f"{claim}: {count}")
        for sentence in self.said:
            console.print(sentence)

    def save(self, command: str) -> None:
        """Writes `benchmarks/results/chaos.json`."""
        document = {
            "benchmark": "chaos",
            "command": command,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.before,
            "seed": self.seed,
            "figures": {f"{row.scenario}: {row.fault}": row.to_wire() for row in self.rows},
            "counts": self.said,
            "claims": {
                f"{claim}: none": {"found": str(count), "holds": count == 0}
                for claim, count in self.broken.items()
            },
        }
        (RESULTS / "chaos.json").write_text(json.dumps(document, indent=2) + "\n")


def command() -> str:
    """What repeats this run, but for its races."""
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("PENSTOCK_CHAOS_")}
    given["PENSTOCK_CHAOS_SEED"] = str(RUN.seed)
    return " ".join([*(f"{name}={value}" for name, value in given.items()), "python -m pytest tests/chaos"])


RUN = Run()
