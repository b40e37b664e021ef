"""What the load tests share; tells their figures at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.callback_targets import Bench, bench
from tests.load.callbacks.arena import LONG, Load, Targets, targets_process
from tests.load.callbacks.figures import RUN
from tests.telling import tell_at_the_end


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


def _table() -> str:
    if not RUN.figures:
        return ""
    console = Console(width=150)
    with console.capture() as table:
        RUN.tell(console)
    return table.get()


tell_at_the_end("callbacks under load", _table)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After a full form, of all tests or of some, the file."""
    if RUN.figures and LONG and exitstatus == 0:
        RUN.save()
