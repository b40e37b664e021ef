"""How soon a release may follow the one before."""

import pytest

from penstock.core.release_pace import LONGEST_S, ReleasePace


def at_rate(tasks_per_s: float, tasks: int = 1, seconds: float = 10.0) -> float:
    """The gap after releases at a steady rate."""
    pace = ReleasePace()
    now_s = 100.0
    for number in range(int(seconds * tasks_per_s / tasks)):
        now_s = 100.0 + number * tasks / tasks_per_s
        pace.add(tasks, now_s)
    return pace.wait_s(now_s)


def test_the_first_release_waits_for_nothing():
    """S6: a task that comes after a rest is released at once."""
    assert ReleasePace().wait_s(0.0) == 0


@pytest.mark.parametrize("rate", [1, 10, 50])
def test_releases_at_a_low_rate_do_not_wait(rate):
    """A ring that takes less than a third of a core saves latency, not CPU."""
    assert at_rate(rate) == 0


def test_the_gap_grows_with_the_rate_up_to_its_limit():
    """Above, CPU counts; tasks that are released together count as those released one by one."""
    gaps = [at_rate(rate) for rate in (90, 180, 300, 400)]
    assert 0 < gaps[0] < gaps[1] < gaps[2] < gaps[3] <= LONGEST_S
    assert at_rate(240) == pytest.approx(0.008, abs=0.001)
    assert at_rate(240, tasks=8) == pytest.approx(0.008, abs=0.002)
    assert at_rate(1_000, tasks=10) == at_rate(100_000, tasks=1_000) == LONGEST_S


def test_a_rest_ends_the_gap():
    """A burst delays no task that comes seconds later."""
    pace = ReleasePace()
    pace.add(1_000, 5.0)
    assert pace.wait_s(5.0) == LONGEST_S
    assert pace.wait_s(5.010) == pytest.approx(LONGEST_S - 0.010)
    assert pace.wait_s(6.0) == 0
    pace.add(1, 10.0)
    assert pace.wait_s(10.0) == 0


def test_a_full_batch_needs_no_gap():
    """At full load a release moves as many tasks as it may: a gap would only lower the rate."""
    pace = ReleasePace()
    pace.add(1_000, 5.0, more=True)
    assert pace.wait_s(5.0) == 0
    pace.add(1, 5.0)
    assert pace.wait_s(5.0) == 0
    pace.add(1, 5.1)
    assert pace.wait_s(5.1) == LONGEST_S
