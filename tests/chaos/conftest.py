"""Tells what the fault tests have counted."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.chaos.arena import LONG
from tests.chaos.figures import RUN, command


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """The table, and after a full form of all scenarios the file."""
    if not RUN.rows:
        return
    console = Console(width=150)
    with console.capture() as table:
        RUN.tell(console)
    terminalreporter.write_sep("=", "what the faults did")
    terminalreporter.write(table.get())
    terminalreporter.write_line(f"again with the same draws: {command()}")
    chosen = terminalreporter.config.option.keyword or "::" in " ".join(terminalreporter.config.args)
    if LONG and exitstatus == 0 and not chosen:
        RUN.save(command())
