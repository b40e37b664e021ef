"""README.md and the comparison show what the benchmarks of other systems found last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.peers import tables

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("page", "result", "table"),
    [
        (tables.README, "peers", tables.short),
        (tables.COMPARISON, "peers", tables.whole),
        (tables.COMPARISON, "peers_kills", tables.losses),
        (tables.COMPARISON, "flows", tables.flows),
    ],
)
def test_the_tables_are_those_of_the_result_files(page, result, table) -> None:
    """O14: a figure of another system is one that a command of this repository found."""
    figures = json.loads((RESULTS / f"{result}.json").read_text())["figures"]
    assert table(figures) in page.read_text()
