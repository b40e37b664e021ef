"""How many tasks go to one partition together, by the duration of the last attempts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.attempt import AttemptId
from penstock.core.attempt_pace import BUNDLE_S, MAX_BUNDLE, AttemptPace


def paced(durations_s, released=32):
    pace = AttemptPace()
    pace.add_released([AttemptId(n, 0, 0) for n in range(released)])
    assert len(pace.due(1.0)) == released
    pace.observe(durations_s)
    return pace


@pytest.mark.parametrize(
    ("durations_s", "bundle"), [([0.001] * 32, MAX_BUNDLE), ([0.008] * 32, 2), ([0.001] * 31 + [1.0], 1)]
)
def test_only_short_attempts_are_bundled(durations_s, bundle):
    """S13: tasks go together where the last attempts were short, all of them."""
    assert paced(durations_s).bundle == bundle


def test_attempts_that_have_not_ended_are_not_bundled():
    """S13: the few attempts that have ended say nothing about the many that have not."""
    assert paced([0.001] * 15).bundle == 1
    assert paced([0.001] * 4, released=8).bundle == 1


@given(st.lists(st.floats(-1, 100), max_size=40))
def test_a_bundle_is_done_within_its_time(durations_s):
    """S13: one after the other, the tasks of a bundle take at most 20 ms, by the last attempts."""
    bundle = paced(durations_s).bundle
    assert bundle == 1 or bundle * max(durations_s) <= BUNDLE_S


def test_a_pace_is_measured_once_a_second():
    """S6: without enough attempts, or too soon, nothing is asked."""
    pace = AttemptPace()
    assert pace.due(1.0) == []
    pace.add_released([AttemptId(n, 0, 0) for n in range(100)])
    assert len(pace.due(1.0)) == 32
    assert pace.due(1.5) == []
    assert pace.due(2.1)
