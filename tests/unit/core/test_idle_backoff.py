"""How long a gateway keeps the unread records of a type that no worker requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.idle_backoff import MAX_FACTOR, IdleBackoff


def test_a_worker_that_returns_soon_doubles_the_delay() -> None:
    """T6: slow workers do not cause a rebalance with each of their requests."""
    backoff = IdleBackoff(1.0)
    delays_s = []
    for now_s in (0.0, 10.0, 20.0, 30.0, 40.0):
        delays_s.append(backoff.delay_s)
        backoff.left(now_s)
        backoff.joining(now_s + 2)
    assert delays_s == [1, 2, 4, 8, 8]


def test_a_long_absence_resets_the_delay() -> None:
    """T6: after an absence longer than the longest delay, the first delay applies again."""
    backoff = IdleBackoff(1.0)
    backoff.left(0.0)
    backoff.joining(1.0)
    assert backoff.delay_s == 2
    backoff.left(2.0)
    backoff.joining(2.0 + MAX_FACTOR)
    assert backoff.delay_s == 1


def test_joining_without_having_left_keeps_the_delay() -> None:
    """T6: only leaving the group while idle counts."""
    backoff = IdleBackoff(1.0)
    for now_s in range(5):
        backoff.joining(float(now_s))
    assert backoff.delay_s == 1


@given(st.floats(0.01, 100), st.lists(st.floats(0, 1000), max_size=50))
def test_the_delay_is_bounded(first_s: float, absences_s: list[float]) -> None:
    """T6: no record waits longer than the longest delay, after any history."""
    backoff, now_s = IdleBackoff(first_s), 0.0
    for absence_s in absences_s:
        backoff.left(now_s)
        now_s += absence_s
        backoff.joining(now_s)
        assert first_s <= backoff.delay_s <= first_s * MAX_FACTOR
