"""What counts as a standstill."""

from __future__ import annotations

from penstock.kafka.watchdog import Standstill


def test_a_mark_that_stays_is_reported_after_the_limit() -> None:
    """O2a: not at the limit, but beyond it."""
    standstill = Standstill(10)
    assert standstill.look(0, {"a": 1, "b": 1}) == []
    assert standstill.look(10, {"a": 1, "b": 2}) == []
    assert standstill.look(11, {"a": 1, "b": 2}) == ["a"]


def test_what_was_at_rest_starts_anew() -> None:
    """O2a: an idle hour is no standstill."""
    standstill = Standstill(10)
    standstill.look(0, {"a": 1})
    standstill.look(9, {})
    assert standstill.look(3_600, {"a": 1}) == []
