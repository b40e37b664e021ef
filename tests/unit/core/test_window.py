"""The window's size: about one second of the workers' work, however many records they have in
flight."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.window import MAX_SAMPLE, Window, WindowPolicy, WindowReason

POLICY = WindowPolicy(floor=100, ceiling=5_000, work_s=1.0)
# The intervals of task-sync for polling the lag and for measuring ended attempts, in seconds.
POLL_S = 0.05
MEASURE_S = 0.2


class Workers:
    """Workers of a type with a limit of attempts in flight and a constant rate, in order of
    arrival."""

    def __init__(self, policy=POLICY, *, max_in_flight, per_s):
        self.window = Window(policy)
        self.max_in_flight = max_in_flight
        self.per_s = per_s
        self.now_s = 0.0
        self.topic = deque()
        self.in_flight = deque()
        self.released_total = self.done = 0
        self.work = 0.0
        self.measured_s = 0.0
        self.idle_s = 0.0
        self.full = False

    def run(self, seconds):
        """Simulates task-sync and the workers with an endless backlog."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            if self.full:
                self.window.observe_lag(len(self.topic), self.now_s)
            room = self.window.size - len(self.topic)
            self.full = room > 0 or len(self.topic) * 2 > self.window.size
            if room > 0:
                keys = [(self.released_total + n, 0, 0) for n in range(room)]
                self.released_total += room
                self.topic.extend(keys)
                self.window.add_released(keys, self.now_s)
            while self.topic and len(self.in_flight) < self.max_in_flight:
                self.in_flight.append(self.topic.popleft())
            self.now_s += POLL_S
            self.work += self.per_s * POLL_S
            for _ in range(min(int(self.work), len(self.in_flight))):
                self.in_flight.popleft()
                self.done += 1
            if self.work > len(self.in_flight) + 1:
                self.idle_s += POLL_S
            self.work %= 1
            if self.now_s - self.measured_s >= MEASURE_S:
                self.measured_s = self.now_s
                sampled = self.window.sample()
                in_flight = {*self.in_flight, *self.topic}
                self.window.observe_sample({key for key in sampled if key in in_flight}, self.now_s)


# Some examples have a hundred thousand tasks.
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8_000), st.integers(1, 4_000))
def test_a_steady_drain_makes_a_window_of_about_a_second(per_s, max_in_flight):
    """S2: the size follows the measured drain between floor and ceiling, for any number of attempts
    in flight."""
    workers = Workers(max_in_flight=max_in_flight, per_s=per_s)
    workers.run(6)
    # Attempts in flight between two polls also limit the rate.
    per_s = min(per_s, max_in_flight / POLL_S)
    expected = min(max(per_s, POLICY.floor), POLICY.ceiling)
    assert 0.6 * expected - 100 <= workers.window.size <= 1.4 * expected + 100, workers.window.reason


def test_starved_workers_get_a_larger_window():
    """S2: while workers empty the window, it grows up to four times, since a small window limits
    the measured drain. Once they leave records, it returns to a second of work."""
    window = Window(POLICY)
    found = []
    for now_s, lag in (
        (0, 100),
        (1, 0),
        (1.1, 10),
        (1.2, 10),
        (2.1, 200),
        (2.3, 200),
        (3.3, 200),
        (4.3, 200),
    ):
        window.observe_lag(lag, now_s)
        found.append((window.size, window.reason))
    sufficient, growing, starved = (
        (100, WindowReason.FLOOR),
        (200, WindowReason.STARVED),
        (400, WindowReason.STARVED),
    )
    assert found == [sufficient, growing, starved, starved, starved, growing, sufficient, sufficient]


def test_records_taken_in_advance_do_not_count_as_drain():
    """S2: workers that take 6,000 records at once and end ten a second leave the window at its
    floor."""
    workers = Workers(max_in_flight=6_000, per_s=10)
    workers.run(10)
    assert len(workers.in_flight) > 1_000
    assert (workers.window.size, workers.window.reason) == (POLICY.floor, WindowReason.FLOOR)


def test_the_window_adapts_within_seconds():
    """S2: the window follows a change of the workers' rate within three seconds, and each size has
    its reason."""
    workers = Workers(max_in_flight=200, per_s=50)
    found = []
    for per_s in (50, 1_000, 20_000, 1_000, 50):
        workers.per_s = per_s
        workers.max_in_flight = max(200, per_s)
        workers.run(3)
        found.append((workers.window.size, workers.window.reason))
    assert [reason for _size, reason in found] == [
        WindowReason.FLOOR,
        WindowReason.DRAIN,
        WindowReason.CEILING,
        WindowReason.DRAIN,
        WindowReason.FLOOR,
    ]
    assert all(700 <= size <= 1_300 for size, reason in found if reason is WindowReason.DRAIN)


def test_a_fast_worker_outgrows_the_floor_at_once():
    """S2: a worker of 6,000 tasks per second idles for less than a second in total, and later
    never."""
    workers = Workers(max_in_flight=3_000, per_s=6_000)
    workers.run(2)
    assert workers.idle_s < 1.0
    before_s = workers.idle_s
    workers.run(20)
    assert workers.idle_s == before_s
    assert workers.done > 6_000 * (22 - 1)


def test_attempts_that_end_during_a_pause_are_no_drain():
    """S2: attempts that end during a pause do not count for the drain after it."""
    workers = Workers(max_in_flight=6_000, per_s=0)
    workers.run(1)
    workers.in_flight.clear()
    workers.topic.clear()
    workers.now_s += 600
    workers.run(1)
    assert workers.window.completions_per_s == 0


def test_the_ceiling_wins_over_the_floor():
    """S2: the size never exceeds the ceiling, also with a higher floor."""
    assert Window(WindowPolicy(floor=100, ceiling=2)).size == 2


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 3_000)), max_size=60))
def test_the_sample_is_bounded_and_representative(steps):
    """S2: the sample has a bounded number of attempts. When all attempts have ended, all were
    counted, except those between two sampled ones."""
    window = Window(POLICY)
    released_total, under_way, now_s = 0, deque(), 0.0
    for released, ended in steps:
        keys = [(released_total + n, 0, 0) for n in range(released)]
        released_total += released
        under_way.extend(keys)
        window.add_released(keys, now_s)
        assert len(window.sample()) <= MAX_SAMPLE
        for _ in range(min(ended, len(under_way))):
            under_way.popleft()
        now_s += 0.01
        still = set(under_way)
        window.observe_sample({key for key in window.sample() if key in still}, now_s)
    window.add_released([], now_s)
    window.observe_sample(set(), now_s + 0.01)
    assert abs(window.completions_per_s * (now_s + 0.01) - released_total) <= max(1, 0.15 * released_total)
