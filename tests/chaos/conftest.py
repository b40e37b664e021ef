"""Prints the counts of the fault tests at the end of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.run_report import RUN, command
from tests.chaos.scenario import LONG
from tests.support.run_summary import add_summary


def _table() -> str:
    if not RUN.rows:
        return ""
    console = Console(width=150)
    with console.capture() as table:
        RUN.print_to(console)
    return f"{table.get()}repeat with the same seed: {command()}\n"


add_summary("fault tests", _table)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Saves the report after the full form of all scenarios, or of those of one file."""
    path, *others = session.config.args
    subset = session.config.option.keyword or "::" in path or others
    if RUN.rows and LONG and exitstatus == 0 and not subset:
        file = Path(path)
        name = f"chaos-{file.stem.removeprefix('test_')}" if file.suffix else "chaos"
        RUN.save(name, command(path))
