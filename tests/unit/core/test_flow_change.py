"""A recovery in another version: what is carried, what is refused, and the counters."""

from __future__ import annotations

import pytest
from tests.support.flows import NOW

from penstock.core.flow.change import Change, change, differences
from penstock.core.flow.decide import decide
from penstock.core.flow.messages import Recovered, Refuse, Start
from penstock.core.flow.plan import Plan
from penstock.core.flow.state import FlowState, FlowStatus, Items, NodeState, NodeStatus

OLD = {
    "flow": "f",
    "version": 1,
    "nodes": {
        "load": {"kind": "task", "type": "a"},
        "check": {"kind": "map", "items": "[1, 2]", "each": {"kind": "task", "type": "a"}, "after": ["load"]},
        "send": {"kind": "task", "type": "a", "after": ["check"]},
        "aside": {"kind": "task", "type": "a"},
    },
}
DONE = NodeState(NodeStatus.SUCCEEDED)
STATES = {
    "load": DONE,
    "check": NodeState(NodeStatus.FAILED, items=Items(2, 2, 1, 1)),
    "send": NodeState(NodeStatus.BLOCKED),
    "aside": NodeState(NodeStatus.RUNNING),
}
FLOW = FlowState(unfinished=1, live=1, unsuccessful=2)


def other(**nodes):
    """The definition with other nodes; None removes one."""
    changed = {**OLD["nodes"], **nodes}
    return {**OLD, "version": 2, "nodes": {name: node for name, node in changed.items() if node is not None}}


def moved(new, chosen=(), states=STATES, flow=FLOW):
    return change(OLD, new, Plan.from_wire(new), flow, states, chosen)


def recovered(new, chosen=(), **given):
    found = moved(new, chosen, **given)
    assert isinstance(found, Change), found
    command = Recovered(1, frozenset(chosen), fresh=found.fresh)
    decision = decide(Plan.from_wire(new), found.flow, [command], NOW, nodes=found.nodes)
    states = {**found.nodes, **decision.nodes}
    counted = [node.status for node in states.values()]
    assert decision.flow.unfinished == sum(not node.is_final for node in states.values())
    assert decision.flow.live == counted.count(NodeStatus.RUNNING)
    starts = [action.node for action in decision.actions if isinstance(action, Start)]
    return found, decision, starts


def test_failed_nodes_may_differ_and_start_from_their_beginning():
    """F3: the items of a failed map are continued only if the map is the same."""
    same, decision, _ = recovered(other(send={"kind": "timer", "delay_s": 1, "after": ["check"]}))
    assert same.fresh == {"send"}
    assert decision.nodes["check"].items == Items(2, 2, 1, 0)
    each = {"kind": "task", "type": "b"}
    fresh, decision, starts = recovered(other(check={**OLD["nodes"]["check"], "each": each}))
    assert fresh.fresh == {"check"}
    assert starts == ["check"]
    assert decision.nodes["check"].items is None


def test_new_nodes_run_and_removed_ones_are_gone():
    """F3: nodes that have not succeeded may be removed, and new ones run behind what is carried."""
    new = other(
        check=None,
        send={"kind": "task", "type": "a", "after": ["added"]},
        added={"kind": "task", "type": "a", "after": ["load"]},
    )
    found, decision, starts = recovered(new)
    assert (found.gone, starts) == ({"check"}, ["added"])
    assert decision.nodes["send"].status is NodeStatus.PENDING
    assert decision.flow.unsuccessful == 0


@pytest.mark.parametrize(
    ("changes", "refused", "texts"),
    [
        (
            {"load": {"kind": "task", "type": "b", "key": "inputs.k"}},
            ("load",),
            ['load differs (type "a" is "b"; key without a value is "inputs.k")'],
        ),
        ({"aside": None}, ("aside",), ["aside is missing"]),
        ({"aside": {"kind": "timer", "delay_s": 1}}, ("aside",), None),
    ],
)
def test_what_is_carried_must_be_the_same(changes, refused, texts):
    """F3: a node that has succeeded, or runs, must not differ; the refusal names it."""
    new = other(**changes)
    assert moved(new) == Refuse("node_changed", refused)
    if texts is not None:
        assert differences(OLD, new, refused) == texts


def test_a_chosen_node_may_differ():
    """F3: a node that succeeded runs again when it is chosen, with all behind it."""
    new = other(load={"kind": "task", "type": "b"})
    _, decision, starts = recovered(new, ("load",))
    assert starts == ["load"]
    assert decision.nodes["check"].status is NodeStatus.PENDING


def test_nodes_that_have_not_begun_may_differ():
    """F3: one that was ready is evaluated again by its new edges."""
    states = {**STATES, "aside": NodeState(NodeStatus.READY)}
    flow = FlowState(unfinished=1, status=FlowStatus.FAILED, unsuccessful=2)
    new = other(aside={"kind": "task", "type": "a", "after": ["send"]})
    found, _, starts = recovered(new, states=states, flow=flow)
    assert found.nodes["aside"].status is NodeStatus.PENDING
    assert "aside" not in starts


def test_a_flow_that_has_not_failed_changes_no_version():
    """F3: a version never changes under nodes that run undisturbed."""
    states = dict.fromkeys(OLD["nodes"], DONE) | {"aside": NodeState(NodeStatus.RUNNING)}
    found = moved(other(), states=states, flow=FlowState(unfinished=1, live=1))
    assert isinstance(found, Change)
    decision = decide(Plan.from_wire(other()), found.flow, [Recovered(1)], NOW, nodes=found.nodes)
    assert decision.actions == (Refuse("nothing_to_recover"),)
