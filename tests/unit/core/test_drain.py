"""How many held callbacks are drained, and how fast they are called."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.call_pacer import CallPacer
from penstock.core.drain import TRANSIT_S, Drain, DrainPolicy


@example(passing=[1.0, 1.0, 1.0], rate=1.75)
@given(st.lists(st.floats(0.001, 3), min_size=1, max_size=200), st.floats(0.1, 100))
def test_a_drain_keeps_its_rate(passing, rate):
    """C10: at most one second's callbacks at once, and the full rate over time."""
    drain = Drain(DrainPolicy(rate=rate))
    drained = drain.allow(0.0, unresponsive=False)
    now_s = 0.0
    most = max(1.0, rate)
    assert drained <= math.ceil(most)
    for passed_s in passing:
        now_s += passed_s
        allowed = drain.allow(now_s, unresponsive=False)
        drained += allowed
        assert allowed <= math.ceil(most)
        # One second's callbacks, and the fraction that is kept.
        assert drained <= most + 1 + now_s * rate + 1e-5
    if max(passing) * rate <= most:
        assert drained >= now_s * rate - 1 - 1e-5


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=300))
def test_probes_of_an_unresponsive_target_back_off(passing):
    """C4a: one at a time, after 5, 10, 20, 40 and then every 60 seconds."""
    drain = Drain(DrainPolicy())
    probes_s, now_s = [], 0.0
    for passed_s in passing:
        now_s += passed_s
        allowed = drain.allow(now_s, unresponsive=True)
        assert allowed in (0, 1)
        probes_s += [now_s] * allowed
    waits_s = [later_s - earlier_s for earlier_s, later_s in itertools.pairwise(probes_s)]
    for wait_s, least_s in zip(waits_s, [5, 10, 20, 40, *[60] * len(waits_s)], strict=False):
        assert least_s <= wait_s + 1e-9 <= least_s + 5 + 2e-9


def test_an_answer_resets_the_probes():
    """C4a: a target that answers is drained; when it hangs again its probes start over."""
    drain = Drain(DrainPolicy(rate=10))
    for now_s in (0, 5, 15, 35):
        assert drain.allow(now_s, unresponsive=True) == 1
    assert drain.allow(36, unresponsive=False) == 10
    assert drain.allow(36.5, unresponsive=False) == 5
    assert drain.allow(37, unresponsive=True) == 1
    assert drain.allow(41.9, unresponsive=True) == 0
    assert drain.allow(42, unresponsive=True) == 1


@given(
    st.floats(0.5, 50),
    st.integers(1, 60),
    st.floats(0.01, 0.3),
    st.lists(st.floats(0, TRANSIT_S), min_size=1, max_size=20),
)
def test_calls_keep_the_rate_of_the_drain(rate, held, tick_s, transits_s):
    """C10: drained callbacks are called at the drain's rate."""
    drain, now_s, arrivals, waiting, called_s = Drain(DrainPolicy(rate=rate)), 0.0, [], 0, []
    pacer, transits = CallPacer(), itertools.cycle(transits_s)
    count = held
    tick_at_s = 0.0
    while len(called_s) < count:
        if held and now_s >= tick_at_s:
            tick_at_s = now_s + tick_s
            allowed = min(held, drain.allow(now_s, unresponsive=False, waiting=waiting))
            held -= allowed
            arrivals += [now_s + next(transits) for _ in range(allowed)]
        waiting += sum(at_s <= now_s for at_s in arrivals)
        arrivals = [at_s for at_s in arrivals if at_s > now_s]
        most = rate if held or drain.is_draining(now_s) else None
        turn_s = None
        while waiting and (turn_s := pacer.acquire("target", "path", now_s, most)) is None:
            called_s.append(now_s)
            waiting -= 1
        now_s = min([*arrivals, *([tick_at_s] if held else []), *([turn_s] if turn_s else [])], default=now_s)
    for earlier_s, later_s in itertools.pairwise(called_s):
        assert later_s - earlier_s >= 1 / rate * (1 - 1e-5)
    # The drain follows the calls, so the last one is late by the transit both ways.
    assert called_s[-1] <= 1.5 * count / rate + 4 * (TRANSIT_S + tick_s)


def test_a_drain_fills_its_path_for_one_second():
    """C10: callbacks that wait on the path count against one second's callbacks."""
    drain = Drain(DrainPolicy(rate=20))
    assert drain.allow(0.0, unresponsive=False, waiting=15) == 5
    assert drain.allow(1.0, unresponsive=False, waiting=20) == 0
    assert drain.allow(2.0, unresponsive=False, waiting=0) == 20
    assert drain.allow(2.5, unresponsive=False, waiting=0) <= 20
    assert not Drain(DrainPolicy()).is_draining(0.0)
