"""The window's size: about a second of what workers get done, whatever they take into their hands."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.window import MOST_WATCHED, Reason, Window, WindowPolicy

POLICY = WindowPolicy(floor=100, ceiling=5_000, work_s=1.0)
# As the gate does it: what was taken is looked at so often, what has ended less often.
LOOK_S = 0.05
MEASURE_S = 0.2


class Workers:
    """A type whose workers hold so many attempts at most and end so many a second, first come first served."""

    def __init__(self, policy=POLICY, *, hand, per_s):
        self.window = Window(policy)
        self.hand = hand
        self.per_s = per_s
        self.now_s = 0.0
        self.topic = deque()
        self.held = deque()
        self.made = self.done = 0
        self.owed = 0.0
        self.measured_s = 0.0
        self.idle_s = 0.0
        self.full = False

    def run(self, seconds):
        """The gate and its workers, with more ready than they can ever do."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            if self.full:
                self.window.left(len(self.topic), self.now_s)
            room = self.window.size - len(self.topic)
            self.full = room > 0 or len(self.topic) * 2 > self.window.size
            if room > 0:
                keys = [(self.made + n, 0, 0) for n in range(room)]
                self.made += room
                self.topic.extend(keys)
                self.window.released(keys, self.now_s)
            while self.topic and len(self.held) < self.hand:
                self.held.append(self.topic.popleft())
            self.now_s += LOOK_S
            self.owed += self.per_s * LOOK_S
            for _ in range(min(int(self.owed), len(self.held))):
                self.held.popleft()
                self.done += 1
            if self.owed > len(self.held) + 1:
                self.idle_s += LOOK_S
            self.owed %= 1
            if self.now_s - self.measured_s >= MEASURE_S:
                self.measured_s = self.now_s
                watched = self.window.watched()
                held = {*self.held, *self.topic}
                self.window.looked({key for key in watched if key in held}, self.now_s)


# Some of them are a hundred thousand tasks.
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8_000), st.integers(1, 4_000))
def test_a_steady_drain_makes_a_window_of_about_a_second(per_s, hand):
    """S2: sized from the measured drain, between floor and ceiling, whatever workers take into their hands."""
    workers = Workers(hand=hand, per_s=per_s)
    workers.run(6)
    # What they can do is bounded by what they hold between two looks, too.
    per_s = min(per_s, hand / LOOK_S)
    wanted = min(max(per_s, POLICY.floor), POLICY.ceiling)
    assert 0.6 * wanted - 100 <= workers.window.size <= 1.4 * wanted + 100, workers.window.reason


def test_who_takes_all_there_is_gets_more_for_as_long():
    """S2: workers that leave nothing of a window are given up to four times as much, which is how a drain is found that is
    held up by the window itself; once they leave something, a second of work is enough again."""
    window = Window(POLICY)
    found = []
    for now_s, left in (
        (0, 100),
        (1, 0),
        (1.1, 10),
        (1.2, 10),
        (2.1, 200),
        (2.3, 200),
        (3.3, 200),
        (4.3, 200),
    ):
        window.left(left, now_s)
        found.append((window.size, window.reason))
    fed, more, hungry = (100, Reason.FLOOR), (200, Reason.HUNGER), (400, Reason.HUNGER)
    assert found == [fed, more, hungry, hungry, hungry, more, fed, fed]


def test_hands_that_are_filled_are_no_drain():
    """S2: workers that take 6,000 records at once and end ten a second leave the window at its floor."""
    workers = Workers(hand=6_000, per_s=10)
    workers.run(10)
    assert len(workers.held) > 1_000
    assert (workers.window.size, workers.window.reason) == (POLICY.floor, Reason.FLOOR)


def test_it_adapts_within_seconds_up_and_down():
    """S2: three seconds after the workers became quicker or slower, so is the window; each size has its reason."""
    workers = Workers(hand=200, per_s=50)
    found = []
    for per_s in (50, 1_000, 20_000, 1_000, 50):
        workers.per_s = per_s
        workers.hand = max(200, per_s)
        workers.run(3)
        found.append((workers.window.size, workers.window.reason))
    assert [reason for _size, reason in found] == [
        Reason.FLOOR,
        Reason.DRAIN,
        Reason.CEILING,
        Reason.DRAIN,
        Reason.FLOOR,
    ]
    assert all(700 <= size <= 1_300 for size, reason in found if reason is Reason.DRAIN)


def test_a_fast_worker_outgrows_the_floor_at_once():
    """S2: the floor costs a worker of 6,000 tasks a second less than a second in all, and then it never runs dry."""
    workers = Workers(hand=3_000, per_s=6_000)
    workers.run(2)
    assert workers.idle_s < 1.0
    before_s = workers.idle_s
    workers.run(20)
    assert workers.idle_s == before_s
    assert workers.done > 6_000 * (22 - 1)


def test_after_a_pause_what_ended_meanwhile_is_no_drain():
    """S2: what was released before a rest and ended in it says nothing of now."""
    workers = Workers(hand=6_000, per_s=0)
    workers.run(1)
    workers.held.clear()
    workers.topic.clear()
    workers.now_s += 600
    workers.run(1)
    assert workers.window.drain_per_s == 0


def test_a_floor_above_the_ceiling_gives_way():
    """S2: the ceiling is the most there is, whatever the floor is set to."""
    assert Window(WindowPolicy(floor=100, ceiling=2)).size == 2


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 3_000)), max_size=60))
def test_what_is_watched_is_bounded_and_stands_for_all(steps):
    """S2: however much is under way, at most so many attempts are watched; when all have ended, all were counted, but for
    the few between two of those that are watched."""
    window = Window(POLICY)
    made, under_way, now_s = 0, deque(), 0.0
    for released, ended in steps:
        keys = [(made + n, 0, 0) for n in range(released)]
        made += released
        under_way.extend(keys)
        window.released(keys, now_s)
        assert len(window.watched()) <= MOST_WATCHED
        for _ in range(min(ended, len(under_way))):
            under_way.popleft()
        now_s += 0.01
        still = set(under_way)
        window.looked({key for key in window.watched() if key in still}, now_s)
    window.released([], now_s)
    window.looked(set(), now_s + 0.01)
    assert abs(window.drain_per_s * (now_s + 0.01) - made) <= max(1, 0.15 * made)
