"""The tables of `benchmarks.peers` and `benchmarks.flows` in Markdown, from their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPARISON = ROOT / "docs" / "explanation" / "comparison.md"
README = ROOT / "README.md"
NOT_SUSTAINED = "no"

Rows = Mapping[str, Mapping[str, Any]]


def short(found: Rows) -> str:
    """The table of README.md: cost and latency at the highest rate below 100, and full speed."""
    rate = max((rate for rate in _rates(found) if float(rate) < 100), key=float)
    high = max(_rates(found), key=float)
    return _table(
        [
            "",
            f"CPU ms a task at {rate}/s",
            f"at {high}/s",
            f"first stage p50 at {rate}/s",
            f"end p50 at {rate}/s",
            "tasks/s at most",
            "CPU ms a task then",
        ],
        [
            [
                name,
                _cpu(of_peer[rate]),
                _cpu(of_peer[high]),
                _ms(of_peer[rate], "first stage ms p50"),
                _ms(of_peer[rate], "end ms p50"),
                _speed(of_peer["full"]),
                _cpu(of_peer["full"]),
            ]
            for name, of_peer in found.items()
        ],
    )


def whole(found: Rows) -> str:
    """All rates: CPU, then p50 and p99 of the first stage and of the end; memory."""
    rates = _rates(found)
    heads = [f"at {rate}/s" for rate in rates]
    return (
        "CPU ms a task, and tasks a second at full speed:\n\n"
        + _table(
            ["", *heads, "at full speed", "tasks/s", "memory MiB"],
            [
                [
                    name,
                    *(_cpu(of_peer[rate]) for rate in rates),
                    _cpu(of_peer["full"]),
                    _speed(of_peer["full"]),
                    f"{sum(of_peer['memory MiB'].values()):,}",
                ]
                for name, of_peer in found.items()
            ],
        )
        + "\nSubmission to the first stage and to the end, p50 / p99 in ms:\n\n"
        + _table(
            ["", *(f"{what} {head}" for head in heads for what in ("first stage", "end"))],
            [
                [
                    name,
                    *(_both(of_peer[rate], what) for rate in rates for what in ("first stage ms", "end ms")),
                ]
                for name, of_peer in found.items()
            ],
        )
    )


def losses(found: Rows) -> str:
    """What kills lost: a line per peer and part."""
    columns = ("acknowledged", "refused", "lost", "waiting", "repeated")
    return _table(
        ["", "kill -9 of", *columns, "all ended after"],
        [
            [
                name,
                fault,
                *(f"{row[column]:,}" for column in columns),
                "not in 100 s"
                if (took := row["all ended s after the last kill"]) is None
                else f"{took:.0f} s",
            ]
            for name, of_peer in found.items()
            for fault, row in of_peer.items()
        ],
    )


def flows(found: Rows) -> str:
    """The figures of flows in other systems: a line per system and flow."""
    rows = {name: row for name, row in found.items() if "flows/s" in row}
    columns = list(next(iter(rows.values())))
    return _table(
        ["", *columns],
        [[name, *(f"{row[column]:,}" for column in columns)] for name, row in rows.items()],
    )


def write(page: Path, name: str, table: str) -> None:
    """Puts a table between its marks in a page."""
    begin, end = f"<!-- {name}: written by the benchmark -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.read_text().split(begin)
    _old, after = rest.split(end)
    page.write_text(before + begin + table + end + after)


def _rates(found: Rows) -> list[str]:
    return [rate for rate in next(iter(found.values())) if rate not in ("full", "memory MiB")]


def _cpu(row: Mapping[str, Any] | None) -> str:
    return NOT_SUSTAINED if row is None else f"{row['CPU ms']['all']:.2f}"


def _speed(row: Mapping[str, Any] | None) -> str:
    return NOT_SUSTAINED if row is None else f"{row['tasks/s']:,.0f}"


def _ms(row: Mapping[str, Any] | None, what: str) -> str:
    return NOT_SUSTAINED if row is None else f"{row[what]:.1f} ms"


def _both(row: Mapping[str, Any] | None, what: str) -> str:
    return NOT_SUSTAINED if row is None else f"{row[f'{what} p50']:.1f} / {row[f'{what} p99']:.0f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(heads), ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
