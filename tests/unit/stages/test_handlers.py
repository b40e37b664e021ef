"""The committer of the stage processor after a failure."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.contracts.result import StageResult, encode_results
from penstock.core.completion import Fence, Outcome
from penstock.errors import Fatal
from penstock.stages.handlers import Committer
from penstock.stages.settings import StagesSettings


async def test_a_record_after_a_failed_commit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: the committer of a failed commit takes no further record, which nothing would commit or settle."""

    async def fail(*_arguments: object) -> None:
        raise Fatal("the statement is wrong")

    monkeypatch.setattr(Committer, "_advance", fail)
    pool: Any = None
    committer = Committer(StagesSettings(), pool, pool, lambda: 0.5)
    settled: list[int] = []

    def delivery(offset: int) -> Any:
        value = encode_results("w", [StageResult(fence=Fence(offset, 0, "s", 0), outcome=Outcome.DONE)])
        return SimpleNamespace(value=value, settle=lambda: settled.append(offset))

    running = asyncio.create_task(committer.run())
    await committer.take(delivery(1))
    with pytest.raises(Fatal, match="wrong"):
        await running
    with pytest.raises(Fatal, match="wrong"):
        await committer.take(delivery(2))
    assert settled == []
