"""Fixtures of the load tests, and a table of their results at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.load.callbacks.paced_load import LONG, Load, Targets, targets_process
from tests.load.callbacks.run_report import RUN
from tests.support.callback_targets import Bench, bench
from tests.support.run_summary import add_summary


@pytest.fixture
async def platform(kafka_servers: str, prefix: str, database: str) -> AsyncIterator[Bench]:
    async with bench(kafka_servers, prefix, database) as bench_platform:
        yield bench_platform


@pytest.fixture
async def targets(tmp_path: Path) -> AsyncIterator[Targets]:
    async with targets_process(tmp_path) as target_process:
        yield target_process


@pytest.fixture
def load(platform: Bench) -> Load:
    return Load(platform)


def _table() -> str:
    if not RUN.results:
        return ""
    console = Console(width=150)
    with console.capture() as table:
        RUN.print_to(console)
    return table.get()


add_summary("callbacks under load", _table)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Saves the results after a full form."""
    if RUN.results and LONG and exitstatus == 0:
        RUN.save()
