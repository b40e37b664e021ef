"""How many may start, by a rate: against the plain sum of what a second allows."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.rate import SAVED_S, Bucket

RATES = st.floats(0.1, 5000)


@given(RATES, st.lists(st.floats(0, 3), min_size=1, max_size=100), st.integers(1, 1000))
def test_no_stretch_of_time_has_more_starts_than_its_rate_and_what_may_be_saved_up(rate, passing, most):
    """S5: between any two moments no more starts than rate times seconds, and a tenth of a second's (or one) on top."""
    bucket = Bucket(rate, 0.0)
    assert bucket.allowed(0.0) == 0, "who takes over begins with nothing"
    now_s, starts = 0.0, [(0.0, 0)]
    for passed_s in passing:
        now_s += passed_s
        taken = min(most, bucket.allowed(now_s))
        bucket.take(taken)
        starts.append((now_s, taken))
    for begin in range(len(starts)):
        count = 0
        for moment_s, taken in starts[begin:]:
            count += taken
            assert count <= (moment_s - starts[begin][0]) * rate + max(1.0, rate * SAVED_S) + 1e-6


@given(RATES, st.floats(1, 20))
def test_who_asks_when_told_to_gets_all_of_the_rate(rate, seconds):
    """S5: waiting as long as `wait_s` says and taking all there is misses nothing, and is no statement for each start."""
    bucket, now_s, count, asked = Bucket(rate, 0.0), 0.0, 0, 0
    while now_s < seconds:
        allowed = bucket.allowed(now_s)
        bucket.take(allowed)
        count += allowed
        asked += 1
        wait_s = bucket.wait_s()
        assert wait_s > 0
        now_s += wait_s
    assert count >= seconds * rate - max(1.0, rate * SAVED_S) - 1
    assert asked <= seconds * min(rate, 100) + 2


@given(RATES, RATES, st.floats(0, 10), st.floats(0, 10))
def test_another_rate_holds_from_the_moment_it_is_set(before, after, first_s, then_s):
    """S5: a change takes effect at once, and what was saved up under the old rate is cut to the new one's."""
    bucket = Bucket(before, 0.0)
    bucket.set_rate(after, first_s)
    assert bucket.allowed(first_s) <= max(1.0, after * SAVED_S) + 1e-6
    assert bucket.allowed(first_s + then_s) <= max(1.0, after * SAVED_S) + 1e-6
    assert bucket.rate == after


def test_a_clock_that_stands_still_gives_nothing():
    """S5: asked again at the same moment, nothing more may start."""
    bucket = Bucket(10, 0.0)
    taken = [bucket.allowed(1.0)]
    bucket.take(taken[0])
    for _ in itertools.repeat(None, 3):
        assert bucket.allowed(1.0) == 0
    assert taken == [1]
