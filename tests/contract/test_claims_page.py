"""docs/claims.md shows what benchmarks/claims.py found last."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_that_of_the_result_file() -> None:
    """O14: each way, with the claims a second and the p99 of each number of workers."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "claims.json").read_text())["figures"]
    page = (ROOT / "docs" / "claims.md").read_text()
    assert len(figures) == 6
    for way, found in figures.items():
        rates = [value for name, value in found.items() if name.endswith("claims/s")]
        waits = [value for name, value in found.items() if name.endswith("p99 (ms)")]
        assert len(rates) == len(waits) == 4
        cells = (f"{rate:,.0f} ({wait:,.1f})" for rate, wait in zip(rates, waits, strict=True))
        assert f"| {way} | {' | '.join(cells)} |" in page
        assert f"| {way} |" in page.partition("<!-- figures")[0], "and what it is"
    assert (ROOT / "docs" / "claims.svg").read_text().count("<svg") == 1
    assert "claims.svg" in page
