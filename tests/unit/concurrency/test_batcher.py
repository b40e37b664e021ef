"""Micro-batching: what goes into a batch, how many are written at once, how a batcher ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.concurrency import batcher as module
from penstock.concurrency.batcher import Batcher
from penstock.errors import Fatal


class Writer:
    """Keeps each batch, and holds it back while `gate` is closed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.now = self.most = 0
        self.began: asyncio.Queue[None] = asyncio.Queue()

    async def write(self, items: Sequence[int]) -> None:
        self.batches.append(list(items))
        self.now += 1
        self.most = max(self.most, self.now)
        self.began.put_nowait(None)
        await self.gate.wait()
        self.now -= 1


async def test_items_that_arrive_during_a_write_are_the_next_batch() -> None:
    """Batches grow with the load, and order is kept."""
    writer = Writer()
    writer.gate.clear()
    batcher = Batcher(writer.write)
    batcher.add(1)
    await writer.began.get()
    for item in (2, 3, 4):
        batcher.add(item)
    assert len(batcher) == 4
    writer.gate.set()
    await batcher.wait_idle()
    assert writer.batches == [[1], [2, 3, 4]]
    assert len(batcher) == 0


async def test_a_batch_is_no_larger_than_its_limit() -> None:
    """Only an item that is larger by itself exceeds the limit, and it goes alone."""
    writer = Writer()
    batcher = Batcher(writer.write, max_size=10, size_of=lambda item: item)
    for item in (4, 5, 3, 20, 1):
        batcher.add(item)
    await batcher.wait_idle()
    assert writer.batches == [[4, 5], [3], [20], [1]]


async def test_batches_are_written_side_by_side_up_to_the_limit() -> None:
    """A batch that waits for a lock does not delay all others."""
    writer = Writer()
    writer.gate.clear()
    batcher = Batcher(writer.write, max_size=1, writers=2)
    for item in range(5):
        batcher.add(item)
    for _ in range(2):
        await writer.began.get()
    writer.gate.set()
    await batcher.wait_idle()
    assert writer.most == 2
    assert sorted(item for batch in writer.batches for item in batch) == list(range(5))


async def test_a_batch_lingers_as_the_one_before_suggests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the batch before decides how long the next waits for more; a full one does not
    wait."""
    waited_s: list[float] = []
    real_timeout = asyncio.timeout

    def timeout(delay_s: float) -> asyncio.Timeout:
        waited_s.append(delay_s)
        return real_timeout(0)

    monkeypatch.setattr(module.asyncio, "timeout", timeout)
    writer = Writer()
    batcher = Batcher(writer.write, max_size=4, linger_s=lambda previous: 0.01 * previous)
    for item in range(6):
        batcher.add(item)
    await batcher.wait_idle()
    batcher.add(6)
    await batcher.wait_idle()
    assert writer.batches == [[0, 1, 2, 3], [4, 5], [6]]
    assert waited_s == pytest.approx([0.04, 0.02])


async def test_an_urgent_item_ends_the_wait_for_more() -> None:
    """Items that may wait are written with an urgent one, and later ones wait again."""
    writer = Writer()
    batcher = Batcher(writer.write, linger_s=lambda _previous: 3600)
    batcher.add(1)
    await asyncio.sleep(0)
    batcher.add(2, urgent=True)
    await batcher.wait_idle()
    batcher.add(3)
    for _ in range(10):
        await asyncio.sleep(0)
    assert writer.batches == [[1, 2]]
    await batcher.stop()


async def test_a_writer_whose_items_another_has_taken_writes_nothing() -> None:
    """Two writers that linger at the same time must not write an empty batch."""
    writer = Writer()
    batcher = Batcher(writer.write, writers=2, linger_s=lambda _previous: 0.001)
    batcher.add(1)
    batcher.add(2)
    await batcher.wait_idle()
    await asyncio.sleep(0.01)
    assert writer.batches == [[1, 2]]


async def test_a_failed_write_ends_the_batcher() -> None:
    """`run` raises what the write raised, and nothing more is written."""
    written: list[int] = []

    async def write(items: Sequence[int]) -> None:
        written.extend(items)
        raise ValueError("no")

    batcher = Batcher(write)
    batcher.add(1)
    with pytest.raises(ValueError, match="no"):
        await batcher.run()
    with pytest.raises(ValueError, match="no"):
        batcher.add(2)
    assert written == [1]


async def test_waiting_for_idle_raises_the_error_of_a_write() -> None:
    """Items that were not written are never taken for written ones."""

    async def write(_items: Sequence[int]) -> None:
        raise ValueError("no")

    batcher = Batcher(write)
    batcher.add(1)
    with pytest.raises(ValueError, match="no"):
        await batcher.wait_idle()


async def test_run_ends_after_its_writes() -> None:
    """A producer or a pool may be closed once `run` has ended."""
    began = asyncio.Event()
    ended: list[bool] = []

    async def write(_items: Sequence[int]) -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    batcher = Batcher(write)
    running = asyncio.create_task(batcher.run())
    batcher.add(1)
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == [True]


async def test_a_batch_that_is_full_by_size_does_not_linger() -> None:
    """A full batch gains nothing from more items."""
    writer = Writer()
    batcher = Batcher(writer.write, max_size=10, size_of=lambda item: item, linger_s=lambda _previous: 3600)
    batcher.add(10)
    await batcher.wait_idle()
    assert writer.batches == [[10]]


async def test_cancelling_run_ends_the_writes() -> None:
    """A service that stops leaves nothing that writes on its own."""
    writer = Writer()
    writer.gate.clear()
    batcher = Batcher(writer.write)
    running = asyncio.create_task(batcher.run())
    batcher.add(1)
    await writer.began.get()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    writer.gate.set()
    batcher.add(2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert writer.batches == [[1]]


async def test_a_write_that_is_cancelled_by_itself_is_an_error() -> None:
    """A library that cancels a part of itself must not end the writer without an error."""

    async def write(_items: Sequence[int]) -> None:
        raise asyncio.CancelledError

    batcher = Batcher(write)
    batcher.add(1)
    with pytest.raises(Fatal, match="without a request"):
        await batcher.wait_idle()
    with pytest.raises(Fatal, match="without a request"):
        await batcher.run()
