"""One timer reports or ends calls that take too long."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.concurrency.timeout_queue import Deadlines, TimeoutQueue

TIMEOUT_S = 3.0
CLOSE_S = 1e-6


class Clock:
    """The clock and the timers of an event loop; a test advances the time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, int, Callable[..., None], tuple[float, ...]]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, call: Callable[..., None], *arguments: float) -> None:
        heapq.heappush(self.timers, (at_s, next(self._order), call, arguments))

    def advance(self, until_s: float, late_s: float) -> None:
        """Advances the time; each timer fires `late_s` late."""
        while self.timers and self.timers[0][0] + late_s <= until_s:
            at_s, _number, call, arguments = heapq.heappop(self.timers)
            self.now_s = max(self.now_s, at_s + late_s)
            call(*arguments)
        self.now_s = max(self.now_s, until_s)


@given(
    calls=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 12)), max_size=30),
    late_s=st.sampled_from([0.0, 0.5, 4.0]),
)
def test_each_item_that_takes_too_long_is_reported_once(
    calls: list[tuple[float, float]], late_s: float
) -> None:
    """C3, issue 5: items begin in turn and end in any order; each is reported once its time is
    over."""
    clock = Clock()
    reported: dict[int, tuple[float, float]] = {}

    def on_timeout(number: int, end_s: float) -> None:
        assert number not in reported
        reported[number] = end_s, clock.now_s

    with patch("asyncio.get_running_loop", return_value=clock):
        queue: TimeoutQueue[int] = TimeoutQueue(TIMEOUT_S, on_timeout)
    begun_s = list(itertools.accumulate((pause_s for pause_s, _took_s in calls), initial=clock.now_s))[1:]
    took_s = [took_s for _pause_s, took_s in calls]
    moments = [(at_s, 0, number) for number, at_s in enumerate(begun_s)]
    moments += [(at_s + took_s[number], 1, number) for number, at_s in enumerate(begun_s)]
    for at_s, what, number in sorted(moments):
        clock.advance(at_s, late_s)
        (queue.add, queue.remove)[what](number)
        assert len(clock.timers) <= 1, "one timer is enough"
    clock.advance(clock.now_s + 100, late_s)
    assert not len(queue)
    assert not clock.timers
    for number, (end_s, reported_at_s) in reported.items():
        assert end_s == pytest.approx(begun_s[number] + TIMEOUT_S)
        assert end_s - CLOSE_S <= reported_at_s <= end_s + late_s + CLOSE_S
        assert took_s[number] >= TIMEOUT_S - CLOSE_S
    assert {number for number, one_s in enumerate(took_s) if one_s > TIMEOUT_S + late_s + CLOSE_S} <= set(
        reported
    )


def test_an_error_of_one_item_does_not_stop_the_others() -> None:
    """C5: the report of the first of three fails; the others are reported."""
    clock, reported = Clock(), []

    def on_timeout(number: int, _end_s: float) -> None:
        if not number:
            raise KeyError(number)
        reported.append(number)

    with patch("asyncio.get_running_loop", return_value=clock):
        queue: TimeoutQueue[int] = TimeoutQueue(TIMEOUT_S, on_timeout)
    for number in range(3):
        queue.add(number)
    with pytest.raises(KeyError):
        clock.advance(clock.now_s + 2 * TIMEOUT_S, 0.0)
    clock.advance(clock.now_s + 2 * TIMEOUT_S, 0.0)
    assert reported == [1, 2]


async def test_a_block_that_takes_too_long_raises_a_timeout() -> None:
    """C5: as `asyncio.timeout`; the task continues, and the next block has its full time."""
    deadlines = Deadlines(0.01)
    for _ in range(2):
        with pytest.raises(TimeoutError), deadlines.start():
            await asyncio.Event().wait()
    with deadlines.start():
        pass
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_each_block_has_its_own_deadline() -> None:
    """C5: of several concurrent blocks, the one that ends in time does not time out."""
    deadlines, ended = Deadlines(0.05), asyncio.Event()

    async def wait(event: asyncio.Event) -> bool:
        try:
            with deadlines.start():
                return await event.wait()
        except TimeoutError:
            return False

    ended.set()
    assert await asyncio.gather(wait(asyncio.Event()), wait(ended), wait(asyncio.Event())) == [
        False,
        True,
        False,
    ]


async def test_a_cancelled_task_is_cancelled() -> None:
    """C5: a cancellation does not become a TimeoutError, before the deadline or after it."""
    deadlines = Deadlines(0.01)

    async def hold(*, swallowing: bool) -> None:
        with deadlines.start():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowing:
                    held.set()
                    await asyncio.Event().wait()
                raise

    task = asyncio.create_task(hold(swallowing=False))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The deadline has passed, and another task cancels it, too.
    held = asyncio.Event()
    task = asyncio.create_task(hold(swallowing=True))
    await held.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_is_raised() -> None:
    """C5: a block that fails in time raises its own error."""
    deadlines = Deadlines(10.0)
    with pytest.raises(KeyError), deadlines.start():
        raise KeyError
