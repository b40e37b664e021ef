"""A host that hangs is bounded as a whole, however many URLs it is called by (C5)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from aiohttp import web
from tests.integration.callbacks.test_diversion import FAST, BlockingAnswer
from tests.support.callback_targets import Bench, Target, make_callback, target_server
from tests.support.waiting import wait_until

from penstock.contracts.event import Callback

# 16 slots for a host that has not answered, and 25 of the slow pool.
MOST_TO_A_HOST = 16 + 25
SETTINGS = {
    **FAST,
    "callback_slots": 60,
    "callback_abnormal_count": 10,
    "callback_drain_rate": 500.0,
}


class Counting(BlockingAnswer):
    """Blocks every call, and counts those under way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = self.most = 0

    async def __call__(self, request: web.Request) -> web.Response:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.unblocked.wait()
            return web.Response()
        finally:
            self.under_way -= 1


async def _waits(platform: Bench, target: Target, first: int, count: int) -> list[float]:
    """Seconds from the publication of each of some callbacks to its call, one after the other."""
    waits = []
    for number in range(first, first + count):
        callback = make_callback(f"{target.url}/healthy?n={number}", number)
        began_s = time.monotonic()
        await platform.enqueue(callback)
        await wait_until(lambda callback=callback: callback.id in target.ids())
        waits.append(next(call.at_s for call in target.calls if call.id == callback.id) - began_s)
    return waits


def _urls(base: str, form: str, count: int) -> list[str]:
    port = base.rpartition(":")[2]
    if form == "query":
        return [f"{base}/cb?n={number}" for number in range(count)]
    names = itertools.cycle(["http://localhost", "HTTP://LocalHost"])
    return [f"{next(names)}:{port}/cb?n={number}" for number in range(count)]


@pytest.mark.parametrize("form", ["query", "name"])
async def test_an_unresponsive_host_with_a_url_per_task_is_bounded(
    platform: Bench, target: Target, form: str
) -> None:
    """C5, C3: each URL is called once, and the host is diverted as a whole.

    A healthy host at the same address waits no longer than without it.
    """
    async with target_server() as unresponsive, platform.service(**SETTINGS):
        unresponsive.answer = counting = Counting()
        alone = await _waits(platform, target, 10_000, 30)
        urls = _urls(unresponsive.url, form, 300)
        hung = [make_callback(url, number) for number, url in enumerate(urls, 1)]
        await platform.enqueue(*hung)
        await wait_until(lambda: len(unresponsive.calls) >= 8)
        beside = await _waits(platform, target, 20_000, 30)
        # A stall of the machine delays a few of them, and a host without bounds delays most.
        assert sorted(beside)[22] < 3 * sorted(alone)[22] + 0.3
        await wait_until(lambda: _most_are_held(platform, hung))
        assert counting.most <= MOST_TO_A_HOST
        calls = len(unresponsive.calls)
        # Probes go on.
        await wait_until(lambda: len(unresponsive.calls) > calls)
        counting.unblocked.set()
        await wait_until(platform.all_delivered)
    assert set(unresponsive.ids()) == {callback.id for callback in hung}


async def _most_are_held(platform: Bench, callbacks: Sequence[Callback]) -> bool:
    rows = await platform.rows()
    return sum(rows[callback.id]["state"] == "held" for callback in callbacks) > 0.8 * len(callbacks)


async def test_a_url_that_hangs_does_not_divert_its_host(platform: Bench, target: Target) -> None:
    """C3, C5: a target of a healthy host is diverted alone."""
    target.answer = BlockingAnswer()
    async with platform.service(**SETTINGS):
        await platform.enqueue(*(make_callback(f"{target.url}/blocked", n) for n in range(1, 41)))
        await wait_until(lambda: _is_abnormal(platform, f"{target.url}/blocked"))
        others = [make_callback(f"{target.url}/other?n={n}", n) for n in range(101, 141)]
        await platform.enqueue(*others)
        await wait_until(lambda: {callback.id for callback in others} <= {*target.ids()})
        rows = await platform.rows()
        assert not any(rows[callback.id]["diverted"] for callback in others)


async def _is_abnormal(platform: Bench, url: str) -> bool:
    state = await platform.connection.fetchval("SELECT state FROM callback_target WHERE url = $1", url)
    return bool(state == "abnormal")
