"""Many in one statement: how long a batch waits for more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.callbacks import batching
from penstock.callbacks.batching import Batches


@pytest.mark.parametrize(
    ("sizes", "expected_s"),
    [
        # Nothing to go by, and little to gain twice; after four as ever, after fifty longer.
        ([1, 3, 4, 50, 7], [0.02, 0.05]),
        ([60, 60, 1, 1], [0.05, 0.05]),
    ],
)
async def test_the_more_there_was_the_longer_a_batch_waits(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], expected_s: list[float]
) -> None:
    """C7b: one statement for many, and no waiting where there is little."""
    waited_s: list[float] = []
    written: list[int] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited_s.append(seconds)
        await real_sleep(0)

    async def write(items: Sequence[int]) -> None:
        written.append(len(items))
        if len(written) < len(sizes):
            for item in range(sizes[len(written)]):
                batches.add(item)
        else:
            done.set()

    monkeypatch.setattr(batching.asyncio, "sleep", sleep)
    batches: Batches[int] = Batches(write, linger_s=0.02, few=4, many=50, many_linger_s=0.05)
    done = asyncio.Event()
    for item in range(sizes[0]):
        batches.add(item)
    running = asyncio.create_task(batches.run())
    await done.wait()
    running.cancel()
    assert written == sizes
    assert waited_s == expected_s
