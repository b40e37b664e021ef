"""The result sender: what it has written when it ends, and when a write fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import INLINE_LIMIT_BYTES, Context
from penstock.contracts.heartbeat import Heartbeat
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.errors import Fatal
from penstock.worker.result_sender import ResultSender

RESULT = StageResult(fence=Fence(1, 0, "s", 0), outcome=Outcome.DONE)
Write = Callable[[], Awaitable[None]]


async def _at_once() -> None:
    pass


async def _refused() -> None:
    raise Fatal("the producer is broken")


class Transport:
    """Calls `results` for each batch of results and `heartbeats` for each heartbeat."""

    def __init__(self, results: Write = _at_once, heartbeats: Write = _at_once) -> None:
        self._results = results
        self._heartbeats = heartbeats

    async def send_results(self, _results: Sequence[StageResult]) -> None:
        await self._results()

    async def send_heartbeat(self, _heartbeat: Heartbeat) -> None:
        await self._heartbeats()


class Blocked:
    """A write that ends only some turns of the loop after its cancellation."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.ended = False

    async def __call__(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            self.ended = True


def _sender(transport: Transport, sent: list[AttemptId]) -> ResultSender:
    def on_sent(results: Sequence[StageResult]) -> list[AttemptId]:
        sent.extend(attempt_ids := [result.fence.attempt_id for result in results])
        return attempt_ids

    return ResultSender(transport, "w", on_sent, lambda attempt_ids: attempt_ids)


@pytest.mark.parametrize("broken", ["results", "heartbeats"])
async def test_a_failed_write_is_not_taken_for_sent(broken: str) -> None:
    """W1, O1: a worker that stops learns that its last results, or the ends of their leases, were
    not stored."""
    sent: list[AttemptId] = []
    transport = Transport(results=_refused) if broken == "results" else Transport(heartbeats=_refused)
    sender = _sender(transport, sent)
    running = asyncio.create_task(sender.run())
    sender.add(RESULT)
    with pytest.raises(Fatal, match="broken"):
        await sender.wait_sent()
    with pytest.raises(Fatal, match="broken"):
        await running
    assert bool(sent) == (broken == "heartbeats")


@pytest.mark.parametrize("blocked_write", ["results", "heartbeats"])
async def test_run_ends_after_its_writes(blocked_write: str) -> None:
    """W1, O11: the producer may be closed once `run` has ended, cancelled or not."""
    blocked = Blocked()
    transport = Transport(results=blocked) if blocked_write == "results" else Transport(heartbeats=blocked)
    sender = _sender(transport, [])
    running = asyncio.create_task(sender.run())
    sender.add(RESULT)
    await blocked.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert blocked.ended


async def test_a_failed_write_ends_the_other_writes() -> None:
    """W1, O11: `run` raises only after the leases' last record is no longer under way."""
    blocked = Blocked()
    failing = asyncio.Event()
    batches = 0

    async def fail_second() -> None:
        nonlocal batches
        batches += 1
        if batches == 2:
            await failing.wait()
            raise Fatal("the producer is broken")

    sender = _sender(Transport(fail_second, blocked), [])
    running = asyncio.create_task(sender.run())
    sender.add(RESULT)
    await blocked.began.wait()
    sender.add(RESULT)
    failing.set()
    with pytest.raises(Fatal, match="broken"):
        await running
    assert blocked.ended


async def test_results_do_not_wait_behind_a_large_one() -> None:
    """T4, T6: a gateway takes no large result while the object store is away. Others are sent."""
    large = StageResult(
        fence=Fence(2, 0, "s", 0),
        outcome=Outcome.DONE,
        context=Context.encode("x" * (INLINE_LIMIT_BYTES + 1)),
    )
    back = asyncio.Event()
    sent: list[AttemptId] = []

    class Gateway(Transport):
        async def send_results(self, results: Sequence[StageResult]) -> None:
            if large in results:
                await back.wait()

    sender = _sender(Gateway(), sent)
    running = asyncio.create_task(sender.run())
    sender.add(large)
    sender.add(RESULT)
    await wait_until(lambda: sent)
    assert sent == [RESULT.fence.attempt_id]
    back.set()
    await sender.wait_sent()
    assert large.fence.attempt_id in sent
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
