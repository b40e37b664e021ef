"""The results of a run of the load tests: a table at its end, and a file after a full form that
passes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from benchmarks.measurements import RESULTS, machine
from rich.console import Console
from rich.table import Table


@dataclass
class Run:
    """All tests of this run.

    Attributes:
        results: measured values, by test and by name.
        before: state of the machine before the first test.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=machine)

    def note(self, name: str, **results: Any) -> None:
        """Adds the results of a test; their names are words with underscores and include units."""
        named = {key.replace("_", " "): value for key, value in results.items()}
        self.results.setdefault(name, {}).update(named)
        print(f"{name}: {named}", flush=True)

    def print_to(self, console: Console) -> None:
        """Prints the table."""
        table = Table("number of issue 5", "figure", "found", title="callbacks under load")
        for name, results in self.results.items():
            for at, (result, found) in enumerate(results.items()):
                table.add_row("" if at else name, result, str(found))
        console.print(table)

    def save(self) -> None:
        """Adds the results to `benchmarks/results/callbacks-load.json`; results of other tests
        stay."""
        path = RESULTS / "callbacks-load.json"
        found = json.loads(path.read_text())["found"] if path.exists() else {}
        at = datetime.now(UTC).isoformat(timespec="seconds")
        new = {
            name: {"at": at, "machine": self.before, "figures": results}
            for name, results in self.results.items()
        }
        command = "PENSTOCK_LOAD_LONG=1 python -m pytest tests/load"
        document = {"benchmark": "callbacks-load", "command": command, "found": {**found, **new}}
        path.write_text(json.dumps(document, indent=2) + "\n")


RUN = Run()
