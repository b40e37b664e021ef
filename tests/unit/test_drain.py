"""What a target that was abnormal is given of what was held for it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.drain import Drain, DrainPolicy


@example(passing=[1.0, 1.0, 1.0], rate=1.75)
@given(st.lists(st.floats(0.001, 3), min_size=1, max_size=200), st.floats(0.1, 100))
def test_never_above_the_rate_and_never_far_below(passing, rate):
    """Issue 5: drained at a bounded rate: at most a second's worth at once, and all of it over time."""
    drain = Drain(DrainPolicy(rate=rate))
    given_out = drain.allow(0.0, hanging=False)
    now_s = 0.0
    most = max(1.0, rate)
    assert given_out <= most
    for passed_s in passing:
        now_s += passed_s
        given_out += drain.allow(now_s, hanging=False)
        assert given_out <= most + now_s * rate + 1e-6
    if max(passing) * rate <= most:
        assert given_out >= now_s * rate - 1 - 1e-6


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=300))
def test_who_hangs_is_probed_less_and_less_often(passing):
    """C4a: one at a time, after 5, 10, 20, 40 and then every 60 seconds."""
    drain = Drain(DrainPolicy())
    probes_s, now_s = [], 0.0
    for passed_s in passing:
        now_s += passed_s
        allowed = drain.allow(now_s, hanging=True)
        assert allowed in (0, 1)
        probes_s += [now_s] * allowed
    waits_s = [later_s - earlier_s for earlier_s, later_s in itertools.pairwise(probes_s)]
    for wait_s, least_s in zip(waits_s, [5, 10, 20, 40, *[60] * len(waits_s)], strict=False):
        assert least_s <= wait_s + 1e-9 <= least_s + 5 + 2e-9


def test_an_answer_makes_it_quick_again():
    """C4a: once it answers it is drained, and when it hangs again it is probed as at first."""
    drain = Drain(DrainPolicy(rate=10))
    for now_s in (0, 5, 15, 35):
        assert drain.allow(now_s, hanging=True) == 1
    assert drain.allow(36, hanging=False) == 10
    assert drain.allow(36.5, hanging=False) == 5
    assert drain.allow(37, hanging=True) == 1
    assert drain.allow(41.9, hanging=True) == 0
    assert drain.allow(42, hanging=True) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("rate", 0.0), ("probe_s", float("nan")), ("probe_most_s", 1.0)]
)
def test_a_policy_that_makes_no_sense_says_so(field: str, value: float):
    """Each problem names its field."""
    problems = dataclasses.replace(DrainPolicy(), **{field: value}).problems()
    assert any(field in problem for problem in problems)
