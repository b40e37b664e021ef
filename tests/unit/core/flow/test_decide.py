"""Decisions one by one: repetitions, policies, commands and limits."""

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.support.flows import (
    CANCELLED,
    FAILED,
    NOW,
    SUCCEEDED,
    Owner,
    begun,
    fan_out,
    flow,
    started,
    task,
)

from penstock.core.flow.decide import decide, initial, rows
from penstock.core.flow.fan_out import CHUNK, FIRST_CHUNK
from penstock.core.flow.messages import (
    Began,
    Cancelled,
    CancelLive,
    CancelNode,
    Ended,
    EndFlow,
    LimitReached,
    Paused,
    Recovered,
    Resumed,
    SetLimit,
    Visited,
    Warn,
)
from penstock.core.flow.plan import Policy
from penstock.core.flow.state import FlowStatus, Limit


@pytest.mark.parametrize("again", [1, 2, 5])
def test_an_ending_that_is_applied_again_counts_once(again):
    """F1: a join starts its node once."""
    owner = begun(flow(a=task(), b=task(), c=task("a", "b")))
    for _ in range(again):
        owner.apply([Ended("a", 0, SUCCEEDED)] * again)
    assert owner.statuses()["c"] == "pending"
    owner.apply([Ended("b", 0, SUCCEEDED), Ended("b", 0, FAILED)])
    owner.apply([Ended("b", 0, FAILED), Ended("a", 0, FAILED), Began()])
    assert started(owner) == ["a", "b", "c"]
    owner.end("c")
    assert owner.flow.status is FlowStatus.SUCCEEDED


def test_a_decision_does_not_change_what_it_was_given():
    """Decisions are pure: the rows of the caller stay as they are."""
    plan = flow(a=task(), b=task("a"))
    state, nodes = initial(plan)
    before = dict(nodes)
    first = decide(plan, state, [Began()], NOW, nodes=nodes)
    assert decide(plan, state, [Began()], NOW, nodes=nodes) == first
    assert nodes == before


def test_only_touched_nodes_and_their_successors_are_needed():
    """The owner loads no row but those of touched nodes and of their successors."""
    plan = flow(a=task(), b=task("a"), c=task("b"), d=task())
    assert rows(plan, [Began()]) == {"a", "b", "d"}
    assert rows(plan, [Ended("a", 0, SUCCEEDED)]) == {"a", "b"}
    assert rows(plan, [Cancelled(), LimitReached(None, 0, Limit.TIMEOUT)]) == frozenset()
    assert rows(plan, [Recovered(1)]) == set("abcd")


def test_the_policy_stop_starts_nothing_more_and_lets_run_what_runs():
    """F1: the flow fails when the last running node has ended."""
    owner = begun(flow(Policy.STOP, a=task(), b=task(), c=task("b")))
    owner.end("a", outcome=FAILED)
    assert owner.flow.status is FlowStatus.RUNNING
    owner.end("b")
    assert owner.statuses() == {"a": "failed", "b": "succeeded", "c": "ready"}
    assert owner.flow.status is FlowStatus.FAILED
    owner.apply([Recovered(1)])
    assert started(owner) == ["a", "b", "a", "c"]


def test_a_paused_flow_starts_nothing_and_counts_ends():
    """F5: what became ready meanwhile starts when the flow is resumed."""
    owner = begun(flow(a=task(), b=task("a"), m=fan_out(parallel=1)), totals={"m": 3})
    owner.apply([Paused()])
    owner.end("a").end("m", 0)
    assert (owner.children, owner.statuses()["b"]) == (set(), "ready")
    owner.apply([Paused(), Resumed()])
    assert owner.children == {("b", None, 0), ("m", 1, 0)}
    assert owner.run().flow.status is FlowStatus.SUCCEEDED


def test_an_end_in_the_batch_of_a_pause_starts_nothing():
    """F5: commands hold for everything that their batch would start."""
    owner = begun(flow(a=task(), b=task("a")))
    owner.apply([Paused(), owner.ending(("a", None, 0))])
    assert owner.statuses() == {"a": "succeeded", "b": "ready"}


def test_a_cancelled_flow_is_final_when_its_last_child_is():
    """F5: nothing starts after the command, and each child still reports its end."""
    owner = begun(flow(a=task(), b=task(), c=task("a")))
    owner.apply([Cancelled(), Cancelled()])
    assert owner.actions.count(CancelLive()) == 1
    owner.end("a")
    assert owner.flow.status is FlowStatus.RUNNING
    owner.end("b", outcome=CANCELLED)
    assert owner.actions[-1] == EndFlow(FlowStatus.CANCELLED)
    assert started(owner) == ["a", "b"]


def test_a_cancellation_that_comes_with_the_last_end_is_too_late():
    """F5: a flow of which everything succeeded has succeeded."""
    owner = begun(flow(a=task()))
    owner.apply([Cancelled(), owner.ending(("a", None, 0))])
    assert owner.flow.status is FlowStatus.SUCCEEDED


def test_a_cancellation_between_two_chunks_opens_no_further_item():
    """F5: cancelled while spawning, a map opens no item afterwards."""
    owner = begun(flow(m=fan_out(parallel=100_000)), totals={"m": 3 * CHUNK})
    later = owner.inbox.copy()
    owner.apply([Cancelled()])
    owner.apply(later)
    owner.apply([owner.ending(child, cancelled=True) for child in sorted(owner.children)])
    assert owner.flow.status is FlowStatus.CANCELLED
    assert len(owner.history) == FIRST_CHUNK
    assert owner.statuses() == {"m": "cancelled"}


def test_a_flow_that_is_cancelled_before_it_begins_starts_nothing():
    """F5: the start and the cancellation may come in either order, and together."""
    for batches in ([[Cancelled()], [Began()]], [[Cancelled(), Began()]]):
        owner = Owner(flow(a=task()))
        for batch in batches:
            owner.apply(batch)
        assert owner.flow.status is FlowStatus.CANCELLED
        assert owner.history == {}


def test_a_paused_map_without_live_items_can_be_cancelled():
    """F5: no item would ever end, so the command itself must end the map."""
    owner = begun(flow(m=fan_out(parallel=1)), totals={"m": 3})
    owner.apply([Paused()])
    owner.end("m", 0)
    owner.apply([Cancelled()])
    assert owner.flow.status is FlowStatus.CANCELLED


def test_nothing_but_a_recovery_changes_a_flow_that_has_ended():
    """F5: late ends, limits and commands are ignored."""
    owner = begun(flow(a=task()), ends={("a",): FAILED})
    owner.end("a")
    before, nodes = owner.flow, dict(owner.nodes)
    late = [
        Ended("a", 0, SUCCEEDED),
        LimitReached("a", 0, Limit.FINISH_WITHIN),
        LimitReached(None, 0, Limit.TIMEOUT),
    ]
    owner.apply([*late, Cancelled(), Paused(), Resumed(), Began(), Visited("a")])
    assert (owner.flow, owner.nodes) == (before, nodes)


def limits(owner):
    return [
        (a.node, a.limit.value, (a.at - NOW) // timedelta(seconds=1))
        for a in owner.actions
        if isinstance(a, SetLimit)
    ]


def test_limits_begin_with_the_start():
    """The limits of the flow begin with the flow, and those of a node when the node starts."""
    limited = task("a", start_within_s=1, finish_within_s=2, warn_after_s=3)
    plan = replace(flow(a=task(), b=limited), timeout_s=10, warn_after_s=5)
    owner = begun(plan)
    assert limits(owner) == [(None, "timeout", 10), (None, "warn_after", 5)]
    owner.end("a")
    assert limits(owner)[2:] == [("b", "start_within", 1), ("b", "finish_within", 2), ("b", "warn_after", 3)]


def test_a_node_that_runs_too_long_is_cancelled_and_has_failed():
    """The limit cancels the child once; the child's end decides."""
    owner = begun(flow(a=task()))
    owner.apply([LimitReached("a", 0, Limit.FINISH_WITHIN)] * 2)
    owner.apply([LimitReached("a", 0, Limit.FINISH_WITHIN)])
    assert owner.actions.count(CancelNode("a", 0)) == 1
    owner.end("a", outcome=CANCELLED)
    assert owner.nodes["a"].reason == "finish_within_s is over"
    assert owner.flow.status is FlowStatus.FAILED


def test_a_success_that_meets_its_limit_counts():
    """An end in the batch of the limit, or while the child is being cancelled, is accepted."""
    for batches in (
        [[LimitReached("a", 0, Limit.FINISH_WITHIN), Ended("a", 0, SUCCEEDED)]],
        [[LimitReached("a", 0, Limit.FINISH_WITHIN)], [Ended("a", 0, SUCCEEDED)]],
    ):
        owner = begun(flow(a=task()))
        for batch in batches:
            owner.apply(batch)
        assert owner.flow.status is FlowStatus.SUCCEEDED


def test_a_map_that_runs_too_long_fails_although_it_tolerates_failures():
    """Items that were cancelled with their map are not those that it tolerates."""
    owner = begun(flow(m=fan_out(tolerate=9, parallel=2)), totals={"m": 5})
    owner.apply([LimitReached("m", 0, Limit.FINISH_WITHIN)])
    owner.end("m", 0, outcome=CANCELLED).end("m", 1, outcome=CANCELLED)
    assert owner.statuses() == {"m": "failed"}
    assert len(owner.history) == 2


def test_a_flow_that_runs_too_long_fails_when_its_children_have_ended():
    """`timeout_s` cancels what runs."""
    owner = begun(flow(a=task(), b=task("a")))
    owner.apply([LimitReached(None, 0, Limit.TIMEOUT)])
    assert CancelLive() in owner.actions
    owner.end("a")
    assert (owner.flow.status, started(owner)) == (FlowStatus.FAILED, ["a"])


def test_a_warning_changes_nothing():
    """`warn_after_s` is an event only."""
    owner = begun(flow(a=task()))
    before = owner.flow
    owner.apply([LimitReached("a", 0, Limit.WARN_AFTER), LimitReached(None, 0, Limit.WARN_AFTER)])
    assert owner.actions[-2:] == [Warn("a", 0), Warn(None, 0)]
    assert owner.flow == before


def test_limits_of_an_old_generation_are_ignored():
    """F3: a recovery sets its own."""
    owner = begun(flow(a=task()), ends={("a",): FAILED}, heals=1)
    owner.end("a").apply([Recovered(1)])
    owner.apply([LimitReached("a", 0, Limit.FINISH_WITHIN), LimitReached(None, 0, Limit.TIMEOUT)])
    assert owner.run().flow.status is FlowStatus.SUCCEEDED
