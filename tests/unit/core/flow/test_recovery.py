"""Recoveries: what runs again, what is carried, what is refused."""

from dataclasses import replace

import pytest
from tests.support.flows import (
    ALL,
    ALL_DONE,
    CANCELLED,
    FAILED,
    SUCCEEDED,
    Owner,
    World,
    begun,
    fan_out,
    flow,
    started,
    task,
)

from penstock.core.flow.messages import (
    Cancelled,
    Ended,
    ItemEnded,
    LimitReached,
    Paused,
    Recovered,
    Refuse,
    ReopenItems,
    Resumed,
    Start,
)
from penstock.core.flow.plan import Edge, NodeKind, Plan
from penstock.core.flow.state import FlowStatus, Items, Limit


def test_a_recovery_while_another_branch_runs():
    """F3: the running branch goes on, and its end counts in the new generation."""
    owner = begun(flow(a=task(), b=task("a"), c=task(), d=task("b", "c")), ends={("a",): FAILED}, heals=1)
    owner.end("a")
    owner.apply([Recovered(1)])
    assert owner.children == {("a", None, 1), ("c", None, 0)}
    owner.end("c").end("a").end("b").end("d")
    assert owner.flow.status is FlowStatus.SUCCEEDED
    assert started(owner) == ["a", "c", "a", "b", "d"]


def test_a_recovery_from_a_chosen_node_runs_its_descendants_again():
    """F3: a node that had succeeded runs anew, and so does everything behind it."""
    owner = begun(flow(a=task(), b=task("a"), c=task("b"), d=task("a")))
    owner.end("a").end("b").end("c").end("d")
    owner.apply([Recovered(1, frozenset({"b"}))])
    assert owner.run().flow.status is FlowStatus.SUCCEEDED
    assert started(owner) == ["a", "b", "d", "c", "b", "c"]


def test_a_recovered_map_runs_only_the_items_that_failed():
    """F3: the list and the items that succeeded are carried; the window holds."""
    failing = {("m", 1): FAILED, ("m", 4): CANCELLED}
    owner = begun(flow(m=fan_out(parallel=9)), totals={"m": 6}, ends=failing, heals=1)
    owner.run()
    owner.apply([Recovered(1)])
    assert owner.actions[-1] == ReopenItems("m", 1, 2)
    assert owner.children == {("m", 1, 1), ("m", 4, 1)}
    assert owner.run().flow.status is FlowStatus.SUCCEEDED


def test_a_recovered_map_opens_what_had_not_been_opened():
    """F3: items that failed come first, then those behind the cursor."""
    owner = begun(flow(m=fan_out(parallel=1)), totals={"m": 3}, ends={("m", 1): FAILED}, heals=1)
    owner.end("m", 0).end("m", 1)
    owner.apply([Recovered(1)])
    owner.end("m", 1).end("m", 2)
    assert [(child[1], child[2]) for child in owner.history] == [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert owner.flow.status is FlowStatus.SUCCEEDED


def test_the_end_of_an_item_of_an_old_generation_is_ignored():
    """F3: an item that runs again has the generation of its last start."""
    owner = begun(flow(m=fan_out()), totals={"m": 2}, ends={("m", 0): FAILED}, heals=1)
    owner.run()
    owner.apply([Recovered(1)])
    owner.apply([ItemEnded("m", 0, 0, SUCCEEDED), ItemEnded("m", 1, 0, FAILED)])
    assert owner.children == {("m", 0, 1)}
    assert owner.nodes["m"].items == Items(2, 2, 1)


def test_a_failed_child_flow_is_recovered_in_place():
    """F3: unless a node before it runs again, and so may change its input."""
    child = replace(task(), kind=NodeKind.FLOW, recoverable_child=True)
    owner = begun(
        flow(a=child, b=replace(child, edges=(Edge("a"),), join=ALL_DONE)),
        ends={("a",): FAILED, ("b",): FAILED},
    )
    owner.end("a").end("b")
    owner.apply([Recovered(1)])
    assert owner.actions[-1] == Start("a", 1, NodeKind.FLOW, recovers=True)
    owner.end("a", outcome=SUCCEEDED)
    assert owner.actions[-1] == Start("b", 1, NodeKind.FLOW, recovers=False)


def test_recovering_a_family_that_is_fifty_deep_runs_only_what_failed():
    """F3: in each generation of the family the carried nodes stay, and the chain recovers down to
    the task that failed."""
    child = replace(task("before"), kind=NodeKind.FLOW, recoverable_child=True)
    family = [begun(flow(before=task(), child=child)) for _ in range(50)]
    leaf = begun(flow(work=task()), ends={("work",): FAILED}, heals=1)
    for owner in family:
        owner.end("before")
    leaf.end("work")
    for owner in reversed(family):
        owner.end("child", outcome=FAILED)
        assert owner.flow.status is FlowStatus.FAILED
    for owner in family:
        owner.apply([Recovered(1)])
        assert owner.actions[-1] == Start("child", 1, NodeKind.FLOW, recovers=True)
    leaf.apply([Recovered(1)])
    leaf.end("work")
    for owner in reversed(family):
        owner.end("child")
        assert owner.flow.status is FlowStatus.SUCCEEDED
        assert started(owner) == ["before", "child", "child"]


@pytest.mark.parametrize(
    ("steps", "command", "refusal"),
    [
        ([], Recovered(1), Refuse("nothing_to_recover")),
        ([], Recovered(1, frozenset({"a"})), Refuse("node_running", ("a",))),
        ([], Recovered(1, frozenset({"x"})), Refuse("unknown_node", ("x",))),
        ([Cancelled()], Recovered(1), Refuse("cancelling")),
        ([LimitReached(None, 0, Limit.TIMEOUT)], Recovered(1), Refuse("timing_out")),
        ([Ended("a", 0, SUCCEEDED)], Recovered(1, frozenset({"a"})), Refuse("node_running", ("b",))),
    ],
)
def test_a_recovery_that_is_not_possible_is_refused(steps, command, refusal):
    """F3: the refusal names the nodes that are in the way, and nothing changes."""
    owner = begun(flow(a=task(), b=task("a")))
    owner.apply(steps)
    before, nodes = owner.flow, dict(owner.nodes)
    owner.apply([command])
    assert owner.actions[-1] == refusal
    assert (owner.flow, owner.nodes) == (before, nodes)


def test_a_recovery_is_applied_once():
    """F3: its generation makes a repetition harmless."""
    owner = begun(flow(a=task()), ends={("a",): FAILED})
    owner.end("a").apply([Recovered(1)])
    owner.end("a")
    owner.apply([Recovered(1), Recovered(3)])
    assert (owner.flow.generation, owner.flow.status) == (1, FlowStatus.FAILED)


def test_a_cancelled_flow_goes_on_where_it_was():
    """F3: nodes that had not started are run by a recovery."""
    owner = begun(flow(a=task(), b=task("a")))
    owner.apply([Cancelled()])
    owner.end("a")
    assert owner.flow.status is FlowStatus.CANCELLED
    owner.apply([Recovered(1)])
    owner.end("b")
    assert (owner.flow.status, started(owner)) == (FlowStatus.SUCCEEDED, ["a", "b"])


def test_a_second_recovery_before_the_node_starts_loses_nothing():
    """F3: a paused flow may be recovered twice; its child and its items stay those to continue."""
    child = replace(task(), kind=NodeKind.FLOW, recoverable_child=True)
    failing = {("c",): FAILED, ("m", 1): FAILED}
    owner = begun(flow(c=child, m=fan_out()), totals={"m": 2}, ends=failing, heals=1)
    owner.run()
    owner.apply([Recovered(1), Paused()])
    owner.apply([Recovered(2, frozenset({"c", "m"}))])
    owner.apply([Resumed()])
    assert Start("c", 2, NodeKind.FLOW, recovers=True) in owner.actions
    assert owner.children == {("c", None, 2), ("m", 1, 2)}


def test_whole_numbers_may_be_written_as_doubles():
    """JSON Schema takes 2.0 for an integer, and a window of 2.0 items must open two."""
    node = {"kind": "map", "each": {"kind": "task"}, "parallel": 2.0, "tolerate": 1.0, "join": {"k": 1.0}}
    plan = Plan.from_wire({"nodes": {"m": node}})
    owner = Owner(
        replace(plan, nodes={"m": replace(plan.nodes["m"], join=ALL)}), World(totals={"m": 5})
    ).begin()
    assert len(owner.children) == 2
    assert repr(plan.nodes["m"].join.k) == "1"
