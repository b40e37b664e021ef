"""The report of a test that is stuck."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.stuck_tests import StuckTests


async def test_the_report_names_what_each_task_waits_for(capfd: pytest.CaptureFixture[str]) -> None:
    """The chain of awaits leads from the task to the line that waits."""
    plugin = StuckTests()
    plugin.pytest_configure()

    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    task = asyncio.create_task(outer(), name="stuck-task")
    await asyncio.sleep(0)
    plugin.report("tests/test_it.py::test_it")
    plugin._stderr.close()
    task.cancel()
    written = capfd.readouterr().err
    assert "tests/test_it.py::test_it is stuck" in written
    chain = written.split("task stuck-task\n")[1].splitlines()[:3]
    assert [line.rpartition(" in ")[2] for line in chain] == ["outer", "inner", "wait"]
    assert "Current thread" in written
