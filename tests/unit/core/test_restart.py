"""The delays between restarts of a process."""

from __future__ import annotations

from penstock.core.restart import RestartPolicy, after_exit

POLICY = RestartPolicy(first_s=0.5, factor=2, longest_s=3, steady_s=20)


def test_delays_double_up_to_the_limit():
    """A process that keeps failing at once restarts after 0.5, 1, 2 and then always 3 seconds."""
    failures, delays = 0, []
    for _ in range(5):
        failures, delay = after_exit(POLICY, failures, started_at=100, now=101)
        delays.append(delay)
    assert delays == [0.5, 1, 2, 3, 3]


def test_a_steady_run_resets_the_count():
    """A run of exactly `steady_s` is a recovery: the next delay is `first_s` again."""
    failures, delay = after_exit(POLICY, 7, started_at=100, now=120)
    assert (failures, delay) == (1, 0.5)


def test_a_run_shorter_than_steady_is_a_failure():
    """A process that ends just before `steady_s` is still failing."""
    failures, delay = after_exit(POLICY, 7, started_at=100, now=119.9)
    assert (failures, delay) == (8, 3)


def test_a_million_failures_do_not_overflow():
    """The delay keeps its limit after a million failures."""
    _, delay = after_exit(POLICY, 1_000_000, started_at=0, now=1)
    assert delay == 3
