"""When work counts as stalled."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

import pytest

from penstock.concurrency import stall_detector
from penstock.concurrency.outages import count_failed_attempt
from penstock.concurrency.stall_detector import LoopWatchdog, StallDetector
from penstock.errors import PostgresUnavailable, Stalled


def test_an_unchanged_mark_is_a_stall_after_the_limit() -> None:
    """O2a: not at the limit, but beyond it; the error names only what stands still."""
    progress: dict[str, Hashable] = {"a": 1, "b": 1}
    detector = StallDetector(10, lambda: progress, name="stages")
    detector.check(0)
    progress["b"] = 2
    detector.check(10)
    with pytest.raises(Stalled, match=r"^stages: a: no progress for 10 s$"):
        detector.check(11)


def test_work_that_was_at_rest_starts_anew() -> None:
    """O2a: an idle hour is no stall."""
    progress: dict[str, Hashable] = {"a": 1}
    detector = StallDetector(10, lambda: progress)
    detector.check(0)
    progress.clear()
    detector.check(9)
    progress["a"] = 1
    detector.check(3_600)
    detector.check(3_610)


def test_an_outage_is_no_stall() -> None:
    """S11: while attempts fail and are repeated, nothing stalls; afterwards times start anew."""
    detector = StallDetector(10, lambda: {"a": 1})
    for now_s in range(0, 100, 5):
        count_failed_attempt()
        detector.check(now_s)
    detector.check(105)
    with pytest.raises(Stalled):
        detector.check(106)


async def test_a_server_that_takes_no_connection_is_an_outage() -> None:
    """S11, O2a: the servers are asked once a mark is unchanged for half the limit. While one takes
    no connection, nothing stalls; when all do, an unchanged mark stalls at the limit."""
    asked: list[float] = []
    frozen = True
    now_s = 0.0

    async def ping() -> None:
        asked.append(now_s)
        if frozen:
            raise PostgresUnavailable("PostgreSQL takes no connection")

    detector = StallDetector(12, lambda: {"a": 1}, [ping])

    async def step(until_s: int) -> None:
        nonlocal now_s
        while now_s < until_s:
            await detector.ask_servers(now_s)
            detector.check(now_s)
            now_s += 1

    await step(60)
    assert asked[0] == 6
    frozen = False
    unchanged_s = asked[-1]
    with pytest.raises(Stalled):
        await step(100)
    assert now_s == unchanged_s + 12 + 1


async def test_a_wait_for_an_answer_counts_for_no_work() -> None:
    """S11, O2a: a server that answers at the end of an outage leaves the work its rest of time."""
    detector = StallDetector(12, lambda: {"a": 1})
    detector.check(0)
    detector.postpone(30)
    detector.check(42)
    with pytest.raises(Stalled):
        detector.check(43)


async def test_the_watchdog_ends_no_loop_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """O2a: the process of a stalled loop ends close to the limit, and never before it."""
    rewound: list[float] = []
    slept: list[float] = []

    class Watchdog(LoopWatchdog):
        def rewind(self, limit_s: float) -> None:
            rewound.append(limit_s)

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(stall_detector.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await Watchdog().run(60.0)
    # A stall that begins right before a rewind ends the process after 60 s, at the earliest.
    assert slept == [5.0] * 3
    assert rewound == [65.0] * 3
