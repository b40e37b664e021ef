"""What the load tests share; tells their figures at the end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.callback_targets import Bench, bench
from tests.load.callbacks.arena import LONG, Load, Targets, targets_process
from tests.load.callbacks.figures import RUN

# What takes minutes also in its short form, and judges latencies, is not for a suite that runs beside others.
collect_ignore = (
    []
    if LONG or os.environ.get("PENSTOCK_LOAD", "") not in ("", "0")
    else ["test_hanging.py", "test_health.py", "test_recovery.py"]
)


@pytest.fixture
async def platform(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[Bench]:
    async with bench(kafka_servers, prefix, database) as made:
        yield made


@pytest.fixture
async def targets(tmp_path: Path) -> AsyncIterator[Targets]:
    async with targets_process(tmp_path) as made:
        yield made


@pytest.fixture
def load(platform: Bench) -> Load:
    return Load(platform)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """The table, and after a full form of all tests the file."""
    if not RUN.figures:
        return
    console = Console(width=150)
    with console.capture() as table:
        RUN.tell(console)
    terminalreporter.write_sep("=", "callbacks under load")
    terminalreporter.write(table.get())
    chosen = terminalreporter.config.option.keyword or "::" in " ".join(terminalreporter.config.args)
    if LONG and exitstatus == 0 and not chosen:
        RUN.save()
