"""The output of the verbs: tables for people, JSON for programs, progress on standard error."""

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

# The number of lines that a list prints without --limit.
DEFAULT_LIMIT = 20

json_option = click.option(
    "--json", "json_", is_flag=True, help="Print JSON for programs, one document a line."
)

# The width of a line when the output is not a terminal, so that no line is wrapped.
_UNLIMITED_WIDTH = 1_000_000


def console() -> Console:
    """Standard output, as wide as the terminal; without a terminal its lines are not wrapped."""
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)


def print_document(document: Any) -> None:
    """Prints one document on one line."""
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_UTC_Z).decode() + "\n")


def progress(*, quiet: bool) -> Progress:
    """A progress bar on standard error; hidden if `quiet`, or without a terminal."""
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
    """Counts by state as text, with final states last: 1 running, 3 succeeded."""
    ordered = sorted(counts.items(), key=lambda item: (item[0] in FINAL, item[0]))
    return ", ".join(f"{count:,} {state}" for state, count in ordered) or "none"


def moment(text: str | None) -> str:
    """A moment of the API in local time, with seconds."""
    if not text:
        return ""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def table(headers: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> None:
    """Prints a plain table; a narrow terminal wraps cells and cuts none, for ids and URLs."""
    rich_table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        rich_table.add_column(header, overflow="fold")
    for row in rows:
        # A `Text`, because rich would take brackets in a string for markup.
        rich_table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    console().print(rich_table)


def fields(pairs: Iterable[tuple[str, str | Text]]) -> None:
    """Prints names and values, one pair a line."""
    rich_table = Table(box=None, pad_edge=False, show_header=False)
    rich_table.add_column(style="dim")
    rich_table.add_column(overflow="fold")
    for name, value in pairs:
        rich_table.add_row(name, value if isinstance(value, Text) else Text(value))
    console().print(rich_table)
