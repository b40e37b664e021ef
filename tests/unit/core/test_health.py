"""The health of a target: the rule against a naive model, and each guard."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.health import HealthPolicy, HealthWindow, SelfCheck
from penstock.core.target import TargetId

RULE = HealthPolicy(share=0.0, decay_s=0.0)


def with_count(times: int, policy: HealthPolicy = RULE, now_s: float = 0.0) -> HealthWindow:
    window = HealthWindow(policy)
    for _ in range(times):
        window.record(slow=True, now_s=now_s)
    return window


def quick(window: HealthWindow, *times_s: float) -> None:
    for at_s in times_s:
        window.record(slow=False, now_s=at_s)


def test_quick_failures_never_make_a_target_abnormal():
    """C2, C4a: consecutive quick failures are counted separately."""
    window = HealthWindow(RULE)
    for at_s in range(1000):
        window.record(slow=False, failed=True, now_s=at_s)
    assert not window.is_abnormal(1000)
    assert window.failures == 1000
    window.record(slow=False, now_s=1001)
    assert window.failures == 0


@given(
    st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=300),
    st.integers(1, 12),
    st.integers(0, 10),
)
def test_the_rule_as_written(calls, threshold, above):
    """C2 to C4 literally: a map of (abnormal_num, abnormal_time) and a flag."""
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
        snapshot = window.snapshot(now_s)
        assert (snapshot.count, snapshot.slow_at_s, window.is_abnormal(now_s)) == (num, time_s, flag)


@given(st.lists(st.tuples(st.floats(0, 200), st.booleans()), max_size=100), st.floats(0, 1000))
def test_a_restored_window_behaves_as_before(calls, later_s):
    """C7b: a window restored from its snapshot behaves as before, and reading changes nothing."""
    policy = dataclasses.replace(RULE, decay_s=6.0)
    one, other = HealthWindow(policy), HealthWindow(policy)
    now_s = 0.0
    for passed_s, slow in calls:
        now_s += passed_s
        one.record(slow=slow, now_s=now_s)
        one.is_abnormal(now_s + later_s)
        other.record(slow=slow, now_s=now_s)
        other = HealthWindow(policy, other.snapshot(now_s))
        assert one.snapshot(now_s + later_s) == other.snapshot(now_s + later_s)


def test_half_a_minute_slow_and_half_a_minute_quick_changes_once():
    """C4: T = 60 s.

    Alternating 30 s of slow and 30 s of quick calls for five minutes cause one transition.
    """
    window = HealthWindow(HealthPolicy())
    changes, before = 0, False
    for at_s in itertools.takewhile(lambda s: s < 300, itertools.count(0, 0.5)):
        window.record(slow=at_s % 60 < 30, now_s=at_s)
        changes += window.is_abnormal(at_s) != before
        before = window.is_abnormal(at_s)
    assert changes == 1


@pytest.mark.parametrize(("share", "seconds"), [(0.001, 120), (0.01, 60), (0.03, 60)])
def test_a_busy_and_mostly_quick_target_stays_normal(share: float, seconds: int):
    """C4a: at 500 calls per second few slow calls divert a target only without the guard."""
    every = round(1 / share)
    guarded, bare = HealthWindow(HealthPolicy()), HealthWindow(RULE)
    for number in range(500 * seconds):
        for window in (guarded, bare):
            window.record(slow=number % every == 0, now_s=number / 500)
    assert not guarded.is_abnormal(seconds)
    assert bare.is_abnormal(seconds)


@pytest.mark.parametrize("share", [0.055, 0.08, 0.5, 1.0])
def test_a_busy_target_that_becomes_slow_is_diverted_within_half_a_minute(share: float):
    """C4a: after a good minute, more than 5 % slow calls divert within 30 s."""
    window = HealthWindow(HealthPolicy())
    for number in range(500 * 60):
        window.record(slow=number % 1000 == 0, now_s=number / 500)
    every = 1 / share
    for number in range(500 * 30):
        window.record(slow=number % every < 1, now_s=60 + number / 500)
    assert window.is_abnormal(90)


def test_a_busy_target_that_hangs_is_diverted():
    """C4a: 500 calls per second, then all hang in a few slots; the weight of the quick ones
    fades."""
    window = HealthWindow(HealthPolicy())
    for number in range(500 * 60):
        window.record(slow=False, now_s=number / 500)
    for number in range(40):
        window.record(slow=True, now_s=63 + number // 8 * 3)
        if window.is_abnormal(63 + number // 8 * 3):
            break
    assert number // 8 * 3 <= 12


def test_the_last_hundred_calls_of_a_quiet_target_count():
    """C4a: one call per second with every fiftieth slow stays normal for two hours."""
    window = HealthWindow(HealthPolicy())
    for at_s in range(7200):
        window.record(slow=at_s % 50 == 49, now_s=at_s)
        assert not window.is_abnormal(at_s)


def test_an_idle_abnormal_target_decays():
    """C4a: an idle target loses one count per 6 s after the calm time.

    Without the guard it stays abnormal.
    """
    window = with_count(20, HealthPolicy(share=0.0))
    assert window.is_abnormal(60 + 59)
    assert not window.is_abnormal(60 + 60)
    assert window.snapshot(60 + 120).count == 0
    assert with_count(20).is_abnormal(1e9)


def test_a_clock_that_is_set_back_does_not_prolong_the_calm_time():
    """C4: slow calls with a time one hour ahead do not extend the calm time."""
    window = with_count(12, now_s=3600.0)
    quick(window, 0, 60.5, 61)
    assert not window.is_abnormal(61)


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 40), st.sampled_from("ab")), min_size=1, max_size=200
    ),
    st.integers(1, 200),
)
def test_self_check_begins_when_many_servers_trip(trips, addresses):
    """C4a: self-check mode needs a tenth of all hosts, and at least ten, within 30 s.

    It resets their targets in all namespaces.
    """
    policy = HealthPolicy(self_check_most_s=1e9)
    self_check = SelfCheck(policy)
    now_s, seen = 0.0, []
    for passed_s, number, namespace in trips:
        now_s += passed_s
        target = TargetId(namespace, str(number))
        seen = [(at_s, name) for at_s, name in [*seen, (now_s, target)] if now_s - at_s <= 30]
        names = {name for _at_s, name in seen}
        urls = {name.url for name in names}
        reset_targets = self_check.trip(target, target.url, now_s, addresses, {"a": addresses})
        # Only a's hosts are in memory, so b's trips alone are not enough.
        rest = {name.url for name in names if name.namespace == "a"}
        alone = any(name.namespace == "b" for name in names) and len(rest) <= addresses / 10
        if len(urls) >= 10 and len(urls) > addresses / 10 and not alone:
            assert set(reset_targets) == names
            assert self_check.is_active(now_s)
            assert self_check.is_active(now_s + 29.9)
            assert not self_check.is_active(now_s + 30)
            assert self_check.was_active(now_s + 59.9)
            assert not self_check.was_active(now_s + 60)
            seen = []
        else:
            assert not reset_targets


def test_one_server_begins_no_self_check():
    """C4a: a server that hangs is one failure, by however many names it is called."""
    self_check = SelfCheck(HealthPolicy())
    for number in range(500):
        target = TargetId("acme", f"http://a{number}/")
        assert not self_check.trip(target, "192.0.2.1 80", 1.0, 500, {"acme": 500})


def test_the_count_of_an_abnormal_target_does_not_decay_while_frozen():
    """C4a: in self-check mode an abnormal target stays abnormal, however long it lasts."""
    frozen, other = with_count(12, HealthPolicy()), with_count(12, HealthPolicy())
    for second in range(301):
        frozen.freeze(second)
    assert frozen.is_abnormal(300)
    assert not other.is_abnormal(300)


def test_self_check_is_bounded():
    """C4a: after five minutes of self-check mode the targets count as the cause."""
    self_check = SelfCheck(HealthPolicy())
    entered_at = [
        second
        for second in range(900)
        for number in range(12)
        if self_check.trip(TargetId("default", str(number)), str(number), second, 100, {"default": 100})
    ]
    assert entered_at[0] == 0
    assert entered_at[-1] == 300


def test_the_default_window():
    """C2 to C4: the tenth slow call raises the flag, and the count stops at 20. Nothing comes off
    within the calm time after the last slow call; then the tenth quick call lowers the flag."""
    policy = HealthPolicy()
    window = HealthWindow(policy)
    flags = []
    for second in range(30):
        window.record(slow=True, now_s=second)
        flags.append(window.is_abnormal(second))
    assert flags.index(True) + 1 == 10
    assert window.snapshot(29).count == 20
    window.record(slow=False, now_s=29 + policy.calm_s)
    assert window.snapshot(29 + policy.calm_s).count == 20
    quick = 0
    while window.is_abnormal(now_s := 30 + policy.calm_s):
        window.record(slow=False, now_s=now_s)
        quick += 1
    assert (quick, window.snapshot(now_s).count) == (10, 10)
