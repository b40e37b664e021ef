"""Reports of benchmarks: a table on the terminal and a file.

`benchmarks/results/<name>.json` has the measurements, the machine and the command.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Describes the machine."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def report(
    name: str, figures: Mapping[str, Mapping[str, Any]], claims: Mapping[str, tuple[str, bool]]
) -> int:
    """Prints measurements and claims, writes the result file; returns 0 when every claim holds.

    Args:
        name: name of the benchmark and of its file.
        figures: rows of the table: measured values by column, for each subject.
        claims: for each claim the measured value as text, and whether the claim holds.
    """
    show(name, figures, claims)
    save(name, figures, claims)
    return 0 if all(holds for _found, holds in claims.values()) else 1


def show(name: str, figures: Mapping[str, Mapping[str, Any]], claims: Mapping[str, tuple[str, bool]]) -> None:
    """Prints measurements and claims; the arguments are those of `report`."""
    console = Console()
    # A table for the rows with the same columns: one for all may be wider than the terminal.
    for columns in dict.fromkeys(tuple(row) for row in figures.values()):
        table = Table("", *columns, title=name)
        for row, values in figures.items():
            if tuple(values) == columns:
                table.add_row(row, *map(str, values.values()))
        console.print(table)
    for claim, (found, holds) in claims.items():
        console.print(f"[{'green' if holds else 'red'}]{'holds' if holds else 'FAILS'}[/]  {claim}: {found}")


def save(name: str, figures: Mapping[str, Mapping[str, Any]], claims: Mapping[str, tuple[str, bool]]) -> None:
    """Writes the result file of a benchmark; the arguments are those of `report`."""
    RESULTS.mkdir(exist_ok=True)
    document = {
        "benchmark": name,
        "command": " ".join(["python -m", _module(), *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "figures": figures,
        "claims": {claim: {"found": found, "holds": holds} for claim, (found, holds) in claims.items()},
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")


def _module() -> str:
    specification = sys.modules["__main__"].__spec__
    return specification.name.removesuffix(".__main__") if specification else sys.argv[0]


class CpuMeter:
    """Measures the CPU seconds (user and system) of processes and their children.

    Children that end meanwhile count, once their parent has awaited them.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._before = self._used()

    def seconds(self) -> float:
        """CPU seconds since the creation of the meter."""
        return self._used() - self._before

    def _used(self) -> float:
        used = 0.0
        for pid in self._pids:
            try:
                parent = psutil.Process(pid)
                family = [parent, *parent.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in family:
                try:
                    times = process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                used += times.user + times.system + times.children_user + times.children_system
        return used


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
