"""How soon a turn may follow the one before."""

import pytest

from penstock.core.turn_pace import TurnPace

LONGEST_S = 0.016


def new_pace() -> TurnPace:
    return TurnPace(60, 420, LONGEST_S)


def at_rate(entries_per_s: float, entries: int = 1, seconds: float = 10.0) -> float:
    """The gap after turns at a steady rate."""
    pace = new_pace()
    now_s = 100.0
    for number in range(int(seconds * entries_per_s / entries)):
        now_s = 100.0 + number * entries / entries_per_s
        pace.add(entries, now_s)
    assert pace.gap_s(now_s) == pace.wait_s(now_s)
    return pace.wait_s(now_s)


def test_the_first_release_waits_for_nothing():
    """S6: a task that comes after a rest is released at once."""
    assert new_pace().wait_s(0.0) == 0


@pytest.mark.parametrize("rate", [1, 10, 50])
def test_releases_at_a_low_rate_do_not_wait(rate):
    """A ring that takes less than a third of a core saves latency, not CPU."""
    assert at_rate(rate) == 0


def test_the_gap_grows_with_the_rate_up_to_its_limit():
    """Above, CPU counts; tasks that are released together count as those released one by one."""
    gaps = [at_rate(rate) for rate in (90, 180, 300, 400)]
    assert 0 < gaps[0] < gaps[1] < gaps[2] < gaps[3] <= LONGEST_S
    assert at_rate(240) == pytest.approx(0.008, abs=0.001)
    assert at_rate(240, entries=8) == pytest.approx(0.008, abs=0.002)
    assert at_rate(1_000, entries=10) == at_rate(100_000, entries=1_000) == LONGEST_S


def test_a_rest_ends_the_gap():
    """A burst delays no task that comes seconds later."""
    pace = new_pace()
    pace.add(1_000, 5.0)
    assert pace.wait_s(5.0) == LONGEST_S
    assert pace.wait_s(5.010) == pytest.approx(LONGEST_S - 0.010)
    assert pace.wait_s(6.0) == 0
    assert pace.gap_s(5.0) == LONGEST_S > pace.gap_s(6.6) > pace.gap_s(7.5) == 0
    pace.add(1, 10.0)
    assert pace.wait_s(10.0) == 0


def test_a_full_batch_needs_no_gap():
    """At full load a release moves as many tasks as it may: a gap would only lower the rate."""
    pace = new_pace()
    pace.add(1_000, 5.0, more=True)
    assert pace.wait_s(5.0) == 0
    pace.add(1, 5.0)
    assert pace.wait_s(5.0) == 0
    pace.add(1, 5.1)
    assert pace.wait_s(5.1) == LONGEST_S
