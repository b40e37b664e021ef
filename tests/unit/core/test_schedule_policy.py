"""The outcome of ticks: catch-up after an outage, and overlap with a running flow."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.schedule_policy import (
    MAX_QUEUED,
    CatchUp,
    Due,
    Overlap,
    Rules,
    Skip,
    SkipReason,
    decide,
)

HOUR = timedelta(hours=1)
NOW = datetime(2026, 11, 23, 12, 0, 5, tzinfo=UTC)
NOON = NOW - timedelta(seconds=5)


def due(*hours_ago, is_all=True, first=None):
    latest = [NOON - hours * HOUR for hours in hours_ago]
    return Due(first or latest[0], latest, is_all)


def ago(*hours):
    return [NOON - hour * HOUR for hour in hours]


def skipped(decision):
    return [(skip.reason, skip.count) for skip in decision.skips]


@pytest.mark.parametrize(
    ("catch_up", "hours_ago", "started", "skips"),
    [
        # On time: nothing was missed.
        ("latest", (0,), (0,), []),
        ("none", (0,), (0,), []),
        # Three were missed, and none is on time.
        ("latest", (3, 2, 1), (1,), [("catch_up", 2)]),
        ("none", (3, 2, 1), (), [("catch_up", 3)]),
        ("all", (3, 2, 1), (3, 2, 1), []),
        # Three were missed, and one is on time.
        ("latest", (3, 2, 1, 0), (0,), [("catch_up", 3)]),
        ("none", (3, 2, 1, 0), (0,), [("catch_up", 3)]),
        ("all", (3, 2, 1, 0), (3, 2, 1, 0), []),
    ],
)
def test_an_outage_follows_catch_up(catch_up, hours_ago, started, skips):
    """F4: what is missed starts, or is recorded as skipped."""
    rules = Rules(catch_up=CatchUp(catch_up), overlap=Overlap.ALLOW)
    decision = decide(rules, due(*hours_ago), [], is_running=False, now=NOW)
    assert decision.starts == ago(*started)
    assert skipped(decision) == skips


def test_catching_up_has_a_limit_and_a_rate():
    """F4: a week of outage starts the latest ones only, and not all at once."""
    rules = Rules(catch_up=CatchUp.ALL, catch_up_limit=5, catch_up_rate=2.0, overlap=Overlap.ALLOW)
    first = NOON - 168 * HOUR
    week = due(6, 5, 4, 3, 2, 1, is_all=False, first=first)
    decision = decide(rules, week, [], is_running=True, now=NOW)
    assert decision.starts == ago(5, 4)
    assert decision.skips == [Skip(first, NOON - 6 * HOUR, None, SkipReason.CATCH_UP)]
    assert decision.queue_at == NOW + timedelta(seconds=1)
    early = decide(rules, None, decision.queued, is_running=True, now=NOW, queue_at=decision.queue_at)
    assert (early.starts, early.queued) == ([], ago(3, 2, 1))
    assert early.queue_at == decision.queue_at
    # With the clock set back by a year, the wait stays a second.
    back = NOW - timedelta(days=365)
    assert decide(
        rules, None, early.queued, is_running=False, now=back, queue_at=NOW
    ).queue_at == back + timedelta(seconds=1)
    later = decide(rules, None, early.queued, is_running=True, now=NOW + HOUR, queue_at=early.queue_at)
    assert (later.starts, later.queued) == (ago(3, 2), ago(1))


@pytest.mark.parametrize(
    ("overlap", "queued", "is_running", "starts", "cancels", "waiting", "skips"),
    [
        ("skip", (), False, (0,), False, (), []),
        ("skip", (), True, (), False, (), [("overlap", 1)]),
        ("queue_one", (), False, (0,), False, (), []),
        ("queue_one", (), True, (), False, (0,), []),
        ("queue_one", (1,), True, (), False, (0,), [("overlap", 1)]),
        ("queue_one", (1,), False, (1,), False, (0,), []),
        ("queue_all", (2, 1), True, (), False, (2, 1, 0), []),
        ("queue_all", (2, 1), False, (2,), False, (1, 0), []),
        ("cancel_other", (), True, (0,), True, (), []),
        ("cancel_other", (), False, (0,), False, (), []),
        ("allow", (), True, (0,), False, (), []),
        # The rule was another one when ticks were queued.
        ("skip", (1,), False, (1,), False, (), [("overlap", 1)]),
        ("cancel_other", (1,), True, (0,), True, (), [("overlap", 1)]),
        ("allow", (1,), True, (1, 0), False, (), []),
    ],
)
def test_a_tick_while_a_flow_is_running(overlap, queued, is_running, starts, cancels, waiting, skips):
    """F4: each rule of overlap."""
    rules = Rules(overlap=Overlap(overlap))
    decision = decide(rules, due(0), ago(*queued), is_running=is_running, now=NOW)
    assert (decision.starts, decision.cancels, decision.queued) == (ago(*starts), cancels, ago(*waiting))
    assert skipped(decision) == skips


def test_a_queue_is_bounded():
    """F4: what does not fit is recorded."""
    rules = Rules(overlap=Overlap.QUEUE_ALL)
    decision = decide(rules, due(0), ago(*range(MAX_QUEUED, 0, -1)), is_running=True, now=NOW)
    assert len(decision.queued) == MAX_QUEUED
    assert skipped(decision) == [("queue_full", 1)]


def test_rules_that_contradict_each_other():
    """F4: catching up on everything would otherwise skip all but one flow."""
    assert Rules(catch_up=CatchUp.ALL, overlap=Overlap.SKIP).problem()
    assert Rules(catch_up=CatchUp.ALL, overlap=Overlap.QUEUE_ALL).problem() is None
    assert Rules().problem() is None


hours = st.sets(st.integers(0, 30), max_size=8).map(lambda found: sorted(found, reverse=True))


@given(
    st.builds(
        Rules,
        catch_up=st.sampled_from(CatchUp),
        catch_up_limit=st.integers(1, 9),
        catch_up_rate=st.sampled_from([0.1, 1.0, 3.5]),
        overlap=st.sampled_from(Overlap),
    ),
    hours,
    hours,
    st.booleans(),
)
def test_each_tick_has_one_outcome(rules, ticks, earlier, is_running):
    """F4: it starts, waits or is recorded as skipped, and it is never lost or doubled."""
    queued = [NOON - (40 + hour) * HOUR for hour in earlier]
    found = due(*ticks) if ticks else None
    decision = decide(rules, found, queued, is_running=is_running, now=NOW)
    counted = sum(skip.count for skip in decision.skips)
    assert len(decision.starts) + len(decision.queued) + counted == len(ticks) + len(queued)
    assert decision.starts == sorted(set(decision.starts))
    assert decision.queued == sorted(set(decision.queued))
    assert not set(decision.starts) & set(decision.queued)
    if rules.overlap not in (Overlap.ALLOW, Overlap.CANCEL_OTHER):
        assert len(decision.starts) <= (0 if is_running else 1)
