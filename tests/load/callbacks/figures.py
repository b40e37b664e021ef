"""What a run of the load tests has found: a table at its end, and a file for the record after a full form that passes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from benchmarks.figures import RESULTS, machine
from rich.console import Console
from rich.table import Table


@dataclass
class Run:
    """All tests of this run.

    Attributes:
        figures: what was found, by test and by what it says.
        before: the machine, as it was before the first test.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=machine)

    def note(self, name: str, **figures: Any) -> None:
        """What a test has found; names are words with underscores, units included."""
        told = {key.replace("_", " "): value for key, value in figures.items()}
        self.figures.setdefault(name, {}).update(told)
        print(f"{name}: {told}", flush=True)

    def tell(self, console: Console) -> None:
        """Prints the table."""
        table = Table("number of issue 5", "figure", "found", title="callbacks under load")
        for name, figures in self.figures.items():
            for at, (figure, found) in enumerate(figures.items()):
                table.add_row("" if at else name, figure, str(found))
        console.print(table)

    def save(self) -> None:
        """Writes what was found into `benchmarks/results/callbacks-load.json`; what is there of other tests stays."""
        path = RESULTS / "callbacks-load.json"
        found = json.loads(path.read_text())["found"] if path.exists() else {}
        at = datetime.now(UTC).isoformat(timespec="seconds")
        new = {
            name: {"at": at, "machine": self.before, "figures": figures}
            for name, figures in self.figures.items()
        }
        command = "PENSTOCK_LOAD_LONG=1 python -m pytest tests/load"
        document = {"benchmark": "callbacks-load", "command": command, "found": {**found, **new}}
        path.write_text(json.dumps(document, indent=2) + "\n")


RUN = Run()
