"""The decision when to start a dead process again."""

from __future__ import annotations

from penstock.core.restart import RestartPolicy, RestartState, after_exit

POLICY = RestartPolicy(first_s=0.5, factor=2, longest_s=3, steady_s=20)


def test_delays_double_up_to_the_longest():
    """A process that keeps dying at once is started after 0.5, 1, 2 and then always 3 seconds."""
    state, delays = RestartState(), []
    for _ in range(5):
        state, delay = after_exit(POLICY, state, started_at=100, now=101)
        delays.append(delay)
    assert delays == [0.5, 1, 2, 3, 3]


def test_a_steady_run_clears_the_count():
    """Exactly `steady_s` of running is recovery: the next delay is the first one again."""
    state, delay = after_exit(POLICY, RestartState(failures=7), started_at=100, now=120)
    assert (state, delay) == (RestartState(failures=1), 0.5)


def test_just_short_of_steady_does_not():
    """A process that dies every 19 seconds is still failing."""
    state, delay = after_exit(POLICY, RestartState(failures=7), started_at=100, now=119.9)
    assert (state, delay) == (RestartState(failures=8), 3)


def test_weeks_of_failing_do_not_overflow():
    """The exponent is bounded."""
    _, delay = after_exit(POLICY, RestartState(failures=1_000_000), started_at=0, now=1)
    assert delay == 3
