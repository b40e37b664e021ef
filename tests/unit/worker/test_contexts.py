"""Attempts while the object store is away: none is charged, and no handler runs twice for it."""

import asyncio
from pathlib import Path

import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.completion import Fence, Outcome
from penstock.objects import ObjectStore
from penstock.worker.contexts import ResultContexts
from penstock.worker.execution import Execution, Stage
from penstock.worker.outcomes import Done

FENCE = Fence(1, 0, "s", 0)
LARGE = "x" * 6_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def store(folder: Path) -> ObjectStore:
    return ObjectStore(f"file://{folder}")


def execution(store: ObjectStore, handler) -> Execution:
    return Execution({("t", "s"): Stage(handler, 5.0, None)}, store, 4)


async def test_an_attempt_that_cannot_read_its_context_is_handed_back(store, folder):
    """T4, S11: the attempt is tried again later without counting as a failure, and its handler does
    not run. A pool of waiting attempts would hold up all others."""
    ready = ReadyTask(FENCE, "t", await store.check_in(Context.encode(LARGE), "default"), 1000)
    ran = []

    async def handler(task):
        ran.append(task.context)
        return Done()

    folder.rename(folder.with_name("away"))
    found = await execution(store, handler).run(ready, lambda _result: None)
    assert found.outcome is Outcome.HANDED_BACK
    assert "the object store is away" in found.error.message
    assert found.delay_ms > 0
    assert not ran
    folder.with_name("away").rename(folder)
    found = await execution(store, handler).run(ready, lambda _result: None)
    assert (found.outcome, ran) == (Outcome.DONE, [LARGE])


async def test_a_result_waits_until_its_context_is_stored(store, folder, caplog):
    """T4, S11: a handler that has ended keeps its outcome while the store is away, and does not run
    again."""
    result = StageResult(fence=FENCE, outcome=Outcome.DONE, context=Context.encode(LARGE))
    folder.rename(folder.with_name("away"))
    storing = asyncio.create_task(ResultContexts(store, lambda _attempt_id: "t").stored(result))
    await wait_until(
        lambda: any(getattr(record, "event", "") == "retry_scheduled" for record in caplog.records)
    )
    assert not storing.done()
    folder.with_name("away").rename(folder)
    found = await storing
    assert found.outcome is Outcome.DONE
    assert (await store.check_out(found.context, "default")).decode() == LARGE
