"""How the verbs show things: tables for people, JSON for programs, progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import click
import orjson
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from penstock.core.task import FINAL

_COLOURS = {
    "succeeded": "green",
    "failed": "red",
    "quarantined": "red",
    "cancelled": "yellow",
    "running": "cyan",
    "paused": "yellow",
    "done": "green",
    "stopped": "yellow",
    "abnormal": "yellow",
    "disabled": "red",
    "held": "yellow",
    "dead": "red",
    "delivered": "green",
}

as_json = click.option("--json", "json_", is_flag=True, help="One JSON document a line, for programs.")


# No line is longer, when it is not a terminal that it goes to.
_ENDLESS = 1_000_000


def console() -> Console:
    """Standard output, as it is now: as wide as the terminal, or as it takes when something else reads it."""
    width = None if sys.stdout.isatty() else _ENDLESS
    return Console(highlight=False, soft_wrap=True, width=width)


def print_json(document: Any) -> None:
    """One document on one line."""
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_UTC_Z).decode() + "\n")


def progress(*, quiet: bool) -> Progress:
    """A bar on standard error; none when nobody would see it."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_COLOURS.get(state, ""))


def counts_text(counts: Mapping[str, int]) -> str:
    """Counts by state in words, what has ended last: 1 running, 3 succeeded."""
    ordered = sorted(counts.items(), key=lambda item: (item[0] in FINAL, item[0]))
    return ", ".join(f"{count:,} {state}" for state, count in ordered) or "none"


def moment(text: str | None) -> str:
    """A moment of the API in local time, to the second."""
    if not text:
        return ""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def table(heads: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> None:
    """A plain table; in a terminal that is too narrow for it cells go on below, since half an id or URL is none."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        shown.add_column(head, overflow="fold")
    for row in rows:
        # Text, so that brackets in somebody's label are not taken for markup.
        shown.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    console().print(shown)


def fields(pairs: Iterable[tuple[str, str | Text]]) -> None:
    """Names and values, one pair a line."""
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="dim")
    shown.add_column(overflow="fold")
    for name, value in pairs:
        shown.add_row(name, value if isinstance(value, Text) else Text(value))
    console().print(shown)
