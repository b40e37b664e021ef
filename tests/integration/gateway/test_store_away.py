"""The object store is away while submissions with large contexts come."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.gateways import Caller

from penstock.client import Client
from penstock.client.models import SubmissionsRefused
from penstock.errors import GatewayUnavailable

LARGE = {"type": "media", "context": "x" * 5_000}
SMALL = {"type": "media", "context": "x"}
FAULTY = {"type": "media", "context": "x", "priority": 1}


def take_away(folder: Path) -> None:
    (folder / "objects").rename(folder / "away")
    (folder / "objects").write_text("a file where the folder was")


def give_back(folder: Path) -> None:
    (folder / "objects").unlink()
    (folder / "away").rename(folder / "objects")


async def test_submissions_of_a_batch_that_need_no_object_are_taken(gateway: Caller, tmp_path: Path) -> None:
    """T5, S11: while the object store is away, a batch is answered 207: its small submissions are
    committed, its large ones may be sent again, and a faulty one is refused."""
    take_away(tmp_path)
    answer = await gateway.post("/tasks", [SMALL, LARGE, FAULTY, SMALL])
    assert answer.status == 207, answer.body
    assert int(answer.headers["Retry-After"]) >= 1
    first, waits, refused, last = answer.body["tasks"]
    assert first["created"]
    assert last["created"]
    assert waits == {
        "errors": [{"pointer": "/1/context", "detail": "the object store is unavailable"}],
        "retry": True,
    }
    assert refused["errors"][0]["pointer"] == "/2/priority"
    assert "retry" not in refused
    give_back(tmp_path)
    again = await gateway.post("/tasks", [LARGE])
    assert again.status == 201


async def test_a_batch_of_which_nothing_is_taken_may_be_sent_again(gateway: Caller, tmp_path: Path) -> None:
    """S11: while the object store is away, a single large submission and a batch without any other
    correct one are answered 503."""
    take_away(tmp_path)
    for body in (LARGE, [LARGE], [LARGE, FAULTY]):
        answer = await gateway.post("/tasks", body)
        assert answer.status == 503, answer.body
        assert answer.headers["Retry-After"]
    give_back(tmp_path)


async def test_the_client_repeats_what_waits_for_the_object_store(gateway: Caller, tmp_path: Path) -> None:
    """S11: `submit_many` returns when the object store is back, with all tasks in their order."""
    take_away(tmp_path)
    async with Client(gateway.url, patience_s=60) as client:
        submitting = asyncio.create_task(client.submit_many([SMALL, LARGE, SMALL]))

        async def small_ones_are_taken() -> bool:
            return len([task async for task in client.list()]) == 2

        while not await small_ones_are_taken():
            assert not submitting.done(), submitting.result()
            await asyncio.sleep(0.02)
        give_back(tmp_path)
        submitted = await submitting
        contexts = [(await client.get(task.id)).context for task in submitted]
    assert contexts == [SMALL["context"], LARGE["context"], SMALL["context"]]
    assert all(task.created for task in submitted)


async def test_the_client_tells_what_still_waits_for_the_object_store(
    gateway: Caller, tmp_path: Path
) -> None:
    """S11: after its patience, `submit_many` names the submissions that wait and returns the tasks
    of the others; without a task, it reports the outage."""
    take_away(tmp_path)
    async with Client(gateway.url, patience_s=0) as client:
        with pytest.raises(SubmissionsRefused) as refused:
            await client.submit_many([SMALL, LARGE])
        assert [task is not None for task in refused.value.submitted] == [True, False]
        assert "object store" in str(refused.value)
        with pytest.raises(GatewayUnavailable, match="object store"):
            await client.submit_many([LARGE])
    give_back(tmp_path)
