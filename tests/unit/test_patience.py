"""Calls that take too long are told of, or ended, by one timer."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.callbacks.patience import Deadlines, Patience

PATIENCE_S = 3.0
CLOSE_S = 1e-6


class Clock:
    """A loop's clock and timers, without the loop: time passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, int, Callable[..., None], tuple[float, ...]]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, call: Callable[..., None], *arguments: float) -> None:
        heapq.heappush(self.timers, (at_s, next(self._order), call, arguments))

    def pass_until(self, until_s: float, late_s: float) -> None:
        """Timers are so late."""
        while self.timers and self.timers[0][0] + late_s <= until_s:
            at_s, _number, call, arguments = heapq.heappop(self.timers)
            self.now_s = max(self.now_s, at_s + late_s)
            call(*arguments)
        self.now_s = max(self.now_s, until_s)


@given(
    calls=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 12)), max_size=30),
    late_s=st.sampled_from([0.0, 0.5, 4.0]),
)
def test_who_takes_too_long_is_told_of_once_and_nobody_else(
    calls: list[tuple[float, float]], late_s: float
) -> None:
    """C3, issue 5: the 3 s moment is a timer. Begun in turn and ended in any order, each is told of once its time is over."""
    clock = Clock()
    told: dict[int, tuple[float, float]] = {}

    def ran_out(number: int, end_s: float) -> None:
        assert number not in told
        told[number] = end_s, clock.now_s

    with patch("asyncio.get_running_loop", return_value=clock):
        patience: Patience[int] = Patience(PATIENCE_S, ran_out)
    begun_s = list(itertools.accumulate((pause_s for pause_s, _took_s in calls), initial=clock.now_s))[1:]
    took_s = [took_s for _pause_s, took_s in calls]
    moments = [(at_s, 0, number) for number, at_s in enumerate(begun_s)]
    moments += [(at_s + took_s[number], 1, number) for number, at_s in enumerate(begun_s)]
    for at_s, what, number in sorted(moments):
        clock.pass_until(at_s, late_s)
        (patience.begin, patience.end)[what](number)
        assert len(clock.timers) <= 1, "one timer is enough"
    clock.pass_until(clock.now_s + 100, late_s)
    assert not len(patience)
    assert not clock.timers
    for number, (end_s, told_at_s) in told.items():
        assert end_s == pytest.approx(begun_s[number] + PATIENCE_S)
        assert end_s - CLOSE_S <= told_at_s <= end_s + late_s + CLOSE_S
        assert took_s[number] >= PATIENCE_S - CLOSE_S
    assert {number for number, one_s in enumerate(took_s) if one_s > PATIENCE_S + late_s + CLOSE_S} <= set(
        told
    )


def test_what_goes_wrong_with_one_does_not_keep_the_others_from_being_told_of() -> None:
    """C5: the first of three cannot be told of; the others, which run out of it at the same moment, are."""
    clock, told = Clock(), []

    def ran_out(number: int, _end_s: float) -> None:
        if not number:
            raise KeyError(number)
        told.append(number)

    with patch("asyncio.get_running_loop", return_value=clock):
        patience: Patience[int] = Patience(PATIENCE_S, ran_out)
    for number in range(3):
        patience.begin(number)
    with pytest.raises(KeyError):
        clock.pass_until(clock.now_s + 2 * PATIENCE_S, 0.0)
    clock.pass_until(clock.now_s + 2 * PATIENCE_S, 0.0)
    assert told == [1, 2]


async def test_a_block_that_takes_too_long_leaves_with_a_timeout() -> None:
    """C5: as with asyncio's own; the task goes on, and the next block has all its time."""
    deadlines = Deadlines(0.01)
    for _ in range(2):
        with pytest.raises(TimeoutError), deadlines.begin():
            await asyncio.Event().wait()
    with deadlines.begin():
        pass
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_each_block_has_its_own_deadline() -> None:
    """C5: many at a time, and one of them ends in time."""
    deadlines, ended = Deadlines(0.05), asyncio.Event()

    async def wait(event: asyncio.Event) -> bool:
        try:
            with deadlines.begin():
                return await event.wait()
        except TimeoutError:
            return False

    ended.set()
    assert await asyncio.gather(wait(asyncio.Event()), wait(ended), wait(asyncio.Event())) == [
        False,
        True,
        False,
    ]


async def test_who_is_cancelled_is_cancelled() -> None:
    """C5: a stop is no deadline, before its time and after."""
    deadlines = Deadlines(0.01)

    async def hold(*, swallowing: bool) -> None:
        with deadlines.begin():
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
    # Its time is over, and somebody else cancels it, too.
    held = asyncio.Event()
    task = asyncio.create_task(hold(swallowing=True))
    await held.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_is_its_own() -> None:
    """C5: what fails in time fails as it did."""
    deadlines = Deadlines(10.0)
    with pytest.raises(KeyError), deadlines.begin():
        raise KeyError
