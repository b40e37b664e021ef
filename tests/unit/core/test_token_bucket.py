"""The token bucket against the plain sum of its rate over time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.token_bucket import TokenBucket

RATES = st.floats(0.1, 5000)
CAPACITIES_S = st.sampled_from([0.1, 2.0])
BATCH_S = 0.02


@given(RATES, CAPACITIES_S, st.lists(st.floats(0, 3), min_size=1, max_size=100), st.integers(1, 1000))
def test_no_stretch_of_time_has_more_than_the_rate_and_the_capacity(rate, capacity_s, pauses, most):
    """S5: between any two moments at most rate times seconds are taken, and one capacity on top."""
    bucket = TokenBucket(rate, 0.0, capacity_s=capacity_s, full=False)
    assert bucket.available(0.0) == 0, "a bucket that starts empty has no token for a new owner"
    now_s, starts = 0.0, [(0.0, 0)]
    for pause_s in pauses:
        now_s += pause_s
        taken = min(most, bucket.available(now_s))
        bucket.take(taken)
        starts.append((now_s, taken))
    for begin in range(len(starts)):
        count = 0
        for moment_s, taken in starts[begin:]:
            count += taken
            assert count <= (moment_s - starts[begin][0]) * rate + max(1.0, rate * capacity_s) + 1e-6


@given(RATES, st.floats(1, 20))
def test_waiting_as_told_uses_the_whole_rate(rate, seconds):
    """S5: a caller that waits for `wait_s` and takes all tokens misses none, and does not ask once
    for each token."""
    bucket = TokenBucket(rate, 0.0, capacity_s=0.1, full=False)
    now_s, count, calls = 0.0, 0, 0
    while now_s < seconds:
        available = bucket.available(now_s)
        bucket.take(available)
        count += available
        calls += 1
        wait_s = bucket.wait_s(BATCH_S)
        assert wait_s > 0
        now_s += wait_s
    assert count >= seconds * rate - max(1.0, rate * 0.1) - 1
    assert calls <= seconds * min(rate, 100) + 2


@given(RATES, RATES, CAPACITIES_S, st.booleans(), st.floats(0, 10), st.floats(0, 10))
def test_a_new_rate_holds_from_the_moment_it_is_set(before, after, capacity_s, full, first_s, then_s):
    """S5: a change takes effect at once, and tokens from the old rate are cut to the new
    capacity."""
    bucket = TokenBucket(before, 0.0, capacity_s=capacity_s, full=full)
    bucket.set_rate(after, first_s)
    assert bucket.available(first_s) <= max(1.0, after * capacity_s) + 1e-6
    assert bucket.available(first_s + then_s) <= max(1.0, after * capacity_s) + 1e-6
    assert bucket.rate == after


@given(st.floats(0.5, 1000), st.lists(st.floats(0, 3), min_size=1, max_size=200))
def test_a_full_bucket_lets_one_burst_through_and_then_the_rate(rate, pauses):
    """O5: at any time at most the rate and one capacity got through; a request that waits for
    `wait_s` gets through."""
    now_s = taken = 0.0
    bucket = TokenBucket(rate, now_s, capacity_s=2.0, full=True)
    assert bucket.available(now_s) == int(max(1.0, rate * 2.0) + 1e-9)
    for pause_s in pauses:
        now_s += pause_s
        if not bucket.available(now_s):
            now_s += bucket.wait_s() + 1e-9
            assert bucket.available(now_s)
        bucket.take()
        taken += 1
        assert taken <= rate * now_s + max(1.0, rate * 2.0) + 1e-6
