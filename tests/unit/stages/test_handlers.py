"""The committer of the stage processor after a failure."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.contracts.result import StageResult, encode_results
from penstock.core.completion import Fence, Outcome, conclude
from penstock.errors import Fatal
from penstock.postgres.ending import Ending
from penstock.stages.handlers import Committer
from penstock.stages.metrics import Metrics
from penstock.stages.result_writer import ResultWriter
from penstock.stages.settings import StagesSettings


async def test_a_record_after_a_failed_commit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: the committer of a failed commit takes no further record, which nothing would commit or
    settle."""

    async def fail(*_arguments: object) -> None:
        raise Fatal("the statement is wrong")

    monkeypatch.setattr(ResultWriter, "in_rounds", fail)
    pool: Any = None
    committer = Committer(StagesSettings(), pool, pool, lambda: 0.5)
    settled: list[int] = []

    def delivery(offset: int) -> Any:
        value = encode_results("w", [StageResult(fence=Fence(offset, 0, "s", 0), outcome=Outcome.DONE)])
        return SimpleNamespace(value=value, header=lambda _name: None, settle=lambda: settled.append(offset))

    running = asyncio.create_task(committer.run())
    await committer.take(delivery(1))
    with pytest.raises(Fatal, match="wrong"):
        await running
    with pytest.raises(Fatal, match="wrong"):
        await committer.take(delivery(2))
    assert settled == []


def test_the_names_of_stages_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """O4: workers name the stages, so the number of histograms is bounded; the rest share one."""
    monkeypatch.setattr("penstock.stages.metrics.MOST_STAGES", 2)
    counted = Metrics()
    for name in ("a", "b", "c", "d", "a"):
        fence = Fence(1, 0, name, 0)
        conclusion = conclude(fence, Outcome.DONE)
        ending = Ending(
            fence=fence,
            outcome=Outcome.DONE,
            conclusion=conclusion,
            worker="w",
            started_ms=1,
            finished_ms=2,
        )
        counted.applied([ending], [fence])
    assert {stage: sum(histogram.counts) for stage, histogram in counted.attempts.items()} == {
        "a": 2,
        "b": 1,
        "other": 2,
    }
