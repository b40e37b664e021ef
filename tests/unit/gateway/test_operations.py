"""The loop that runs bulk operations, without a database."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.contracts.event import OutboxEntry
from penstock.core.operations import TaskFilter
from penstock.gateway.operation_runner import OperationRunner
from penstock.postgres import operations
from penstock.postgres.operations import BatchResult


class Producer:
    def enqueue(self, entry: OutboxEntry) -> None:
        """Publishes nothing."""


async def test_an_operation_that_another_coroutine_has_ended_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O2c: a request and the loop run the same operation; once it has ended, nothing is due."""
    ended = asyncio.Event()
    waits = iter([0.0, None])

    async def run_batch(*_arguments: Any, **_more: Any) -> BatchResult:
        wait_s = next(waits)
        if wait_s is None:
            ended.set()
        else:
            await ended.wait()
        return BatchResult(0, OutboxEntry(), wait_s)

    monkeypatch.setattr(operations, "run_batch", run_batch)
    runner = OperationRunner(
        cast(Any, SimpleNamespace(event_source="test")),
        cast(Any, None),
        cast(Any, Producer()),
        cast(Any, None),
    )
    runner._filters["one"], runner._due["one"] = TaskFilter(), 0.0
    await asyncio.gather(runner.run_batch("one"), runner.run_batch("one"))
    await runner.run_batch("one")
    assert runner._due == {}
