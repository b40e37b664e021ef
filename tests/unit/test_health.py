"""The health of a target, against the rule in words, a naive model, and the guards one by one."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.health import HealthPolicy, HealthWindow, Suspicion, Vitals
from penstock.core.target import TargetId

RULE = HealthPolicy(share=0.0, decay_s=0.0)


def charged(times: int, policy: HealthPolicy = RULE, now_s: float = 0.0) -> HealthWindow:
    window = HealthWindow(policy)
    for _ in range(times):
        window.record(slow=True, now_s=now_s)
    return window


def quick(window: HealthWindow, *times_s: float) -> None:
    for at_s in times_s:
        window.record(slow=False, now_s=at_s)


def test_the_tenth_slow_call_makes_a_target_abnormal():
    """C3: nine do not, ten do."""
    window = charged(9)
    assert not window.verdict(0)
    window.record(slow=True, now_s=1)
    assert window.verdict(1)


def test_the_count_ends_at_twenty_and_only_the_time_moves_on():
    """C3: twenty at most; a slow call after that still begins the calm time anew."""
    window = charged(30)
    assert window.vitals(0).count == 20
    window.record(slow=True, now_s=50)
    quick(window, 100)
    assert window.vitals(100) == Vitals(20, 50, 100, abnormal=True)


def test_nothing_is_taken_off_within_the_calm_time():
    """C4: only if now - abnormal_time > T: exactly T is not enough."""
    window = charged(12)
    quick(window, *range(61))
    assert window.vitals(60).count == 12
    quick(window, 60.5)
    assert window.vitals(60.5).count == 11


def test_it_is_normal_again_when_a_count_taken_off_leaves_ten():
    """C4: from 12 to 11 it stays abnormal, at 10 the normal path takes over; a slow call then makes it abnormal at once."""
    window = charged(12)
    quick(window, 61)
    assert window.verdict(61)
    quick(window, 62)
    assert not window.verdict(62)
    window.record(slow=True, now_s=63)
    assert window.verdict(63)


def test_the_count_ends_at_nought():
    """C4: down to 0."""
    window = charged(2)
    quick(window, 61, 62, 63, 64)
    assert window.vitals(64).count == 0


def test_quick_failures_never_make_a_target_abnormal():
    """C2, C4a: they are counted apart, on end."""
    window = HealthWindow(RULE)
    for at_s in range(1000):
        window.record(slow=False, failed=True, now_s=at_s)
    assert not window.verdict(1000)
    assert window.failures == 1000
    window.record(slow=False, now_s=1001)
    assert window.failures == 0


@given(
    st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=300),
    st.integers(1, 12),
    st.integers(0, 10),
)
def test_the_rule_as_written(calls, threshold, above):
    """C2 to C4, word by word: a map of (abnormal_num, abnormal_time) and a flag."""
    policy = dataclasses.replace(RULE, threshold=threshold, ceiling=threshold + above)
    window = HealthWindow(policy)
    num, time_s, flag, now_s = 0, None, False, 0.0
    for passed_s, slow in calls:
        now_s += passed_s
        window.record(slow=slow, now_s=now_s)
        if slow:
            num = min(num + 1, threshold + above)
            time_s = now_s
            if num >= threshold:
                flag = True
        elif num > 0 and (time_s is None or now_s - time_s > 60):
            num -= 1
            if num <= threshold:
                flag = False
        vitals = window.vitals(now_s)
        assert (vitals.count, vitals.slow_at_s, window.verdict(now_s)) == (num, time_s, flag)


@given(st.lists(st.tuples(st.floats(0, 200), st.booleans()), max_size=100), st.floats(0, 1000))
def test_what_was_kept_goes_on_as_if_nothing_had_happened(calls, later_s):
    """C7b: restored from its vitals after any call, a window gives the same verdicts; asking changes nothing."""
    policy = dataclasses.replace(RULE, decay_s=6.0)
    one, other = HealthWindow(policy), HealthWindow(policy)
    now_s = 0.0
    for passed_s, slow in calls:
        now_s += passed_s
        one.record(slow=slow, now_s=now_s)
        one.verdict(now_s + later_s)
        other.record(slow=slow, now_s=now_s)
        other = HealthWindow(policy, other.vitals(now_s))
        assert one.vitals(now_s + later_s) == other.vitals(now_s + later_s)


def test_half_a_minute_slow_and_half_a_minute_quick_changes_once():
    """C4: T = 60 s; slow for 30 s and quick for 30 s in turn: one transition in five minutes, not one a minute."""
    window = HealthWindow(HealthPolicy())
    changes, before = 0, False
    for at_s in itertools.takewhile(lambda s: s < 300, itertools.count(0, 0.5)):
        window.record(slow=at_s % 60 < 30, now_s=at_s)
        changes += window.verdict(at_s) != before
        before = window.verdict(at_s)
    assert changes == 1


@pytest.mark.parametrize(("share", "seconds"), [(0.001, 600), (0.01, 60), (0.03, 60)])
def test_a_busy_target_that_is_nearly_always_quick_stays(share: float, seconds: int):
    """C4a: 500 calls a second, for up to ten minutes; without the guard the same calls divert it."""
    every = round(1 / share)
    guarded, bare = HealthWindow(HealthPolicy()), HealthWindow(RULE)
    for number in range(500 * seconds):
        for window in (guarded, bare):
            window.record(slow=number % every == 0, now_s=number / 500)
    assert not guarded.verdict(seconds)
    assert bare.verdict(seconds)


@pytest.mark.parametrize("share", [0.055, 0.08, 0.5, 1.0])
def test_a_busy_target_that_becomes_slow_is_found_within_half_a_minute(share: float):
    """C4a, issue 5: after ten good minutes, more than 5 % slow: diverted within 30 s."""
    window = HealthWindow(HealthPolicy())
    for number in range(500 * 60):
        window.record(slow=number % 1000 == 0, now_s=number / 500)
    every = 1 / share
    for number in range(500 * 30):
        window.record(slow=number % every < 1, now_s=60 + number / 500)
    assert window.verdict(90)


def test_a_busy_target_that_hangs_is_found_though_few_calls_get_through():
    """C4a: 500 calls a second, then all hang and a few slots are all it gets: the quick ones fade."""
    window = HealthWindow(HealthPolicy())
    for number in range(500 * 60):
        window.record(slow=False, now_s=number / 500)
    for number in range(40):
        window.record(slow=True, now_s=63 + number // 8 * 3)
        if window.verdict(63 + number // 8 * 3):
            break
    assert number // 8 * 3 <= 12


def test_a_quiet_target_is_judged_by_its_last_hundred_calls():
    """C4a: one call a second, every fiftieth slow, for two hours: 98 % healthy, and it stays."""
    window = HealthWindow(HealthPolicy())
    for at_s in range(7200):
        window.record(slow=at_s % 50 == 49, now_s=at_s)
        assert not window.verdict(at_s)


def test_an_idle_abnormal_target_decays():
    """C4a: without a call it loses one count in six seconds after the calm time; with the guard off it never comes back."""
    window = charged(20, HealthPolicy(share=0.0))
    assert window.verdict(60 + 59)
    assert not window.verdict(60 + 60)
    assert window.vitals(60 + 120).count == 0
    assert charged(20).verdict(1e9)


def test_a_clock_that_is_set_back_does_not_prolong_the_calm_time():
    """C4: an hour ahead when the slow calls were; put right, the calm time is T and not T and an hour."""
    window = charged(12, now_s=3600.0)
    quick(window, 0, 60.5, 61)
    assert not window.verdict(61)


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 40), st.sampled_from("ab")), min_size=1, max_size=200
    ),
    st.integers(1, 200),
)
def test_suspicion_against_the_last_trips(trips, addresses):
    """C4a: it holds exactly when more than a tenth of all addresses, and at least ten, tripped within 30 s, in however many
    namespaces each; then it forgives them."""
    policy = HealthPolicy(suspicion_most_s=1e9)
    suspicion = Suspicion(policy)
    now_s, seen = 0.0, []
    for passed_s, number, namespace in trips:
        now_s += passed_s
        target = TargetId(namespace, str(number))
        seen = [(at_s, name) for at_s, name in [*seen, (now_s, target)] if now_s - at_s <= 30]
        names = {name for _at_s, name in seen}
        urls = {name.url for name in names}
        forgiven = suspicion.trip(target, now_s, addresses)
        if len(urls) >= 10 and len(urls) > addresses / 10:
            assert set(forgiven) == names
            assert suspicion.suspects(now_s)
            assert suspicion.suspects(now_s + 29.9)
            assert not suspicion.suspects(now_s + 30)
            assert suspicion.suspected(now_s + 59.9)
            assert not suspicion.suspected(now_s + 60)
            seen = []
        else:
            assert not forgiven


def test_suspicion_does_not_last_for_ever():
    """C4a: when they trip again and again for five minutes it is the targets."""
    suspicion = Suspicion(HealthPolicy())
    suspected_at = [
        second
        for second in range(900)
        for number in range(12)
        if suspicion.trip(TargetId("default", str(number)), second, 100)
    ]
    assert suspected_at[0] == 0
    assert suspected_at[-1] == 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slow_s", 0.0),
        ("slow_s", float("nan")),
        ("threshold", 0),
        ("ceiling", 9),
        ("calm_s", -1.0),
        ("share", 1.1),
        ("suspicion_share", -0.1),
        ("recent_calls", 0),
    ],
)
def test_a_policy_that_makes_no_sense_says_so(field: str, value: float):
    """The settings are checked together, and each problem names its field."""
    (problem,) = dataclasses.replace(HealthPolicy(), **{field: value}).problems()
    assert f"{field}={value}" in problem
