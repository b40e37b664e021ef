"""Tells what the fault tests have counted."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.chaos.arena import LONG
from tests.chaos.figures import RUN, command
from tests.telling import tell_at_the_end


def _table() -> str:
    if not RUN.rows:
        return ""
    console = Console(width=150)
    with console.capture() as table:
        RUN.tell(console)
    return f"{table.get()}again with the same draws: {command()}\n"


tell_at_the_end("what the faults did", _table)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After a full form of all scenarios, the file."""
    chosen = session.config.option.keyword or "::" in " ".join(session.config.args)
    if RUN.rows and LONG and exitstatus == 0 and not chosen:
        RUN.save(command())
