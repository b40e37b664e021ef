"""How long a gateway keeps what none of its workers asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.giving_back import MOST, Patience


def test_at_first_it_is_short_and_a_worker_that_comes_back_soon_doubles_it() -> None:
    """T6: a gateway whose workers are slow does not make the group change hands at each of their requests."""
    patience = Patience(1.0)
    found = []
    for now_s in (0.0, 10.0, 20.0, 30.0, 40.0):
        found.append(patience.seconds)
        patience.give_back(now_s)
        patience.ask(now_s + 2)
    assert found == [1, 2, 4, 8, 8]


def test_who_stays_away_is_no_reason_to_keep_anything() -> None:
    """T6: after a longer absence it begins anew."""
    patience = Patience(1.0)
    patience.give_back(0.0)
    patience.ask(1.0)
    assert patience.seconds == 2
    patience.give_back(2.0)
    patience.ask(2.0 + MOST)
    assert patience.seconds == 1


def test_joining_for_any_other_reason_changes_nothing() -> None:
    """T6: only what was given back counts."""
    patience = Patience(1.0)
    for now_s in range(5):
        patience.ask(float(now_s))
    assert patience.seconds == 1


@given(st.floats(0.01, 100), st.lists(st.floats(0, 1000), max_size=50))
def test_it_is_bounded(first_s: float, passing: list[float]) -> None:
    """T6: no record waits longer than the longest patience, whatever happened before."""
    patience, now_s = Patience(first_s), 0.0
    for passed_s in passing:
        patience.give_back(now_s)
        now_s += passed_s
        patience.ask(now_s)
        assert first_s <= patience.seconds <= first_s * MOST
