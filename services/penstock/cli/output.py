"""The output of the verbs: tables for people, JSON for programs, progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import orjson
from rich.cells import cell_len
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

T = TypeVar("T")

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

# Columns with ids, which people copy.
_WHOLE = frozenset({"id", "task", "flow", "child", "worker", "callback", "seq"})
# The least width of any other column, and the longest words that stay whole, as there is room.
_NARROWEST = 4
_WORDS = (20, 16, 12, 10, 8, 6, _NARROWEST)

# The width of a line when the output is not a terminal, so that no line is wrapped.
_UNLIMITED_WIDTH = 1_000_000


def console() -> Console:
    """Standard output, as wide as the terminal; without a terminal its lines are not wrapped."""
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)


def print_document(document: Any) -> None:
    """Prints one document on one line."""
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_UTC_Z).decode() + "\n")


def print_answer(document: Any, text: str, *, json_: bool) -> None:
    """Prints what a verb has done: a document for programs, or a sentence."""
    if json_:
        print_document(document)
    else:
        click.echo(text)


def print_list(
    found: Iterable[T],
    headers: Iterable[str],
    row: Callable[[T], Iterable[str | Text]],
    empty: str,
    *,
    json_: bool,
    document: Callable[[T], Any] = lambda each: each,
) -> None:
    """Prints a list: one document a line for programs, or a table.

    Args:
        found: the elements.
        headers: of the table.
        row: the cells of an element.
        empty: the sentence in place of a table without rows.
        json_: whether to print documents; each is printed as soon as it is there.
        document: the document of an element.
    """
    if json_:
        for each in found:
            print_document(document(each))
        return
    rows = [row(each) for each in found]
    if rows:
        table(headers, rows)
    else:
        console().print(empty, markup=False)


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


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 node", "2,000 nodes". The plural of the noun is regular."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_COLOURS.get(state, ""))


def counts_text(counts: Mapping[str, int]) -> str:
    """Counts by state as text, with final states last: 1 running, 3 succeeded."""
    ordered = sorted(counts.items(), key=lambda item: (item[0] in FINAL, item[0]))
    return ", ".join(f"{count:,} {state}" for state, count in ordered) or "none"


def shorten(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= 2000 else f"{text[:2000]} … ({len(text):,} characters; --json shows all)"


def moment(text: str | None) -> str:
    """A moment of the API in local time, with seconds and the offset from UTC."""
    if not text:
        return ""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        # PostgreSQL has years that datetime lacks.
        return text
    found = found.replace(tzinfo=found.tzinfo or UTC)
    # East of UTC the year 9999 ends earlier, and west of it the year 1 begins later.
    with suppress(OverflowError, ValueError):
        found = found.astimezone()
    # The blank before the offset lets a narrow table break there.
    shown = found.isoformat(" ", "seconds")
    return f"{shown[:19]} {shown[19:]}"


def table(headers: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> None:
    """Prints a plain table.

    A narrow terminal wraps cells and cuts none: ids stay whole, and words as far as there is room.
    """
    names = [*headers]
    # A `Text`, because rich would take brackets in a string for markup.
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    out = console()
    widths, gap = _widths(names, cells, out.width), 2
    if widths is not None and _total(widths, gap) > out.width:
        gap = 1
    if widths is None:
        # The terminal wraps the lines, which cuts no id.
        out.width = _UNLIMITED_WIDTH
    rich_table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for number, name in enumerate(names):
        width = None if widths is None else widths[number]
        rich_table.add_column(name, overflow="fold", no_wrap=name in _WHOLE, width=width)
    for row in cells:
        rich_table.add_row(*row)
    out.print(rich_table)


def _widths(names: Sequence[str], cells: Sequence[Sequence[Text]], room: int) -> list[int] | None:
    """The width of each column; None when the ids alone need more room."""
    natural = [max([1, len(name), *(row[n].cell_len for row in cells)]) for n, name in enumerate(names)]
    if _total(natural, 2) <= room:
        return natural
    least = next(
        (found for widest in _WORDS if _total(found := _least(names, cells, widest), 1) <= room), None
    )
    if least is None:
        return None
    widths, left = [*least], room - _total(least, 1)
    # The columns that lack least come first, so that what they leave goes to the others.
    order = sorted(range(len(names)), key=lambda n: natural[n] - least[n])
    for place, n in enumerate(order):
        more = max(0, min(natural[n] - least[n], left // (len(order) - place)))
        widths[n] += more
        left -= more
    return widths


def _least(names: Sequence[str], cells: Sequence[Sequence[Text]], widest: int) -> list[int]:
    """The least width of each column: that of its ids, or of its longest word up to `widest`."""
    found = []
    for n, name in enumerate(names):
        if name in _WHOLE:
            found.append(max([len(name), *(row[n].cell_len for row in cells)]))
        else:
            words = [cell_len(word) for row in cells for word in row[n].plain.split()]
            found.append(min(widest, max([1, min(len(name), _NARROWEST), *words])))
    return found


def _total(widths: Sequence[int], gap: int) -> int:
    """The width of a table, with so many blanks between two columns."""
    return sum(widths) + gap * (len(widths) - 1)


def fields(pairs: Iterable[tuple[str, str | Text]]) -> None:
    """Prints names and values, one pair a line."""
    rich_table = Table(box=None, pad_edge=False, show_header=False)
    rich_table.add_column(style="dim")
    rich_table.add_column(overflow="fold")
    for name, value in pairs:
        rich_table.add_row(name, value if isinstance(value, Text) else Text(value))
    console().print(rich_table)
