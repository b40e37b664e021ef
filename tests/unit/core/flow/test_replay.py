"""Replays: a run agrees with its own version, and a change shows where it decides."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.flows import NOW, Owner, random_plan, random_world

from penstock.core.flow.plan import Plan
from penstock.core.flow.replay import Record, RecordedNode, compare, replay
from penstock.core.flow.state import FINAL_NODES, NodeStatus, StopReason

STARTED = {NodeStatus.RUNNING, NodeStatus.SUCCEEDED, NodeStatus.FAILED, NodeStatus.CANCELLED}


def recorded(owner, ended):
    """The record of an owner's flow; `ended` has the transaction of each end."""
    nodes = {}
    for name, node in owner.nodes.items():
        if node.status not in STARTED:
            continue
        counts = {}
        if node.items is not None:
            counts = {
                "total": node.items.total,
                "succeeded": node.items.succeeded,
                "unsuccessful": node.items.unsuccessful,
            }
        at = NOW + timedelta(seconds=ended[name]) if name in ended else None
        kind = owner.plan.nodes[name].kind
        nodes[name] = RecordedNode(kind, node.status, at, node.timed_out is not None, node.case, **counts)
    return Record(nodes)


@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=True))
def test_a_run_agrees_with_its_own_version(rng):
    """F3: random graphs, outcomes and orders: the replay ends each node as it ended, and a version
    does not differ from itself."""
    plan = random_plan(rng)
    owner = Owner(plan, random_world(rng, plan)).begin()
    ended, transaction = {}, 0
    while True:
        for name, node in owner.nodes.items():
            if node.status in FINAL_NODES:
                ended.setdefault(name, transaction)
        if not (owner.inbox or owner.children):
            break
        owner.step(rng)
        transaction += 1
    record = recorded(owner, ended)
    # A flow that has stopped does not always tell the nodes behind that they are blocked.
    replayed = {name: decided.status for name, decided in replay(plan, record).items()}
    assert {name: status for name, status in replayed.items() if status in STARTED} == {
        name: node.status for name, node in owner.nodes.items() if node.status in STARTED
    }
    assert compare(plan, plan, record) == []


def node(kind="task", *after, **more):
    each = {"each": {"kind": "task"}} if kind == "map" else {}
    return {"kind": kind, **({"after": list(after)} if after else {}), **each, **more}


def plan_of(**nodes):
    return Plan.from_wire({"nodes": nodes})


def done(kind="task", at=0.0, status=NodeStatus.SUCCEEDED, **more):
    return RecordedNode(kind, status, NOW + timedelta(seconds=at), **more)


OLD = plan_of(
    load=node(),
    check=node(),
    pick=node("switch", "load"),
    send=node("task", "pick.yes"),
    stop=node("task", "pick.no"),
    each=node("map", "load", tolerate=2),
)
RECORD = Record(
    {
        "load": done(at=1),
        "check": done(at=2),
        "pick": done("switch", 1, case="yes"),
        "send": done(at=3),
        "each": done("map", 4, total=10, succeeded=8, unsuccessful=2),
    }
)
SEND = "node send starts after pick, and ends as succeeded; in the other version it "
CHANGES = {
    "waits longer": (
        {"send": node("task", "pick.yes", "check")},
        [SEND + "starts after check, and ends as succeeded"],
    ),
    "other branch": (
        {"send": node("task", "pick.no")},
        [SEND + "is skipped"],
    ),
    "new node": (
        {"audit": node("task", "send")},
        [
            "node audit does not exist; in the other version it starts after send, and the record does not have its end"
        ],
    ),
    "other kind": (
        {"send": node("wait", "pick.yes")},
        [SEND + "starts after pick, and the record does not have its end"],
    ),
    "no failed item": (
        {"each": node("map", "load")},
        [
            (
                "node each starts after load, and ends as succeeded; in the other version it starts after load, "
                "and ends as failed"
            )
        ],
    ),
    "more may fail": ({"each": node("map", "load", tolerate=5, parallel=7)}, []),
}


@pytest.mark.parametrize(("changed", "sentences"), CHANGES.values(), ids=CHANGES)
def test_each_change_is_named_where_it_decides(changed, sentences):
    """F3: what does not change a decision is no difference."""
    nodes = {
        "load": node(),
        "check": node(),
        "pick": node("switch", "load"),
        "send": node("task", "pick.yes"),
        "stop": node("task", "pick.no"),
        "each": node("map", "load", tolerate=2),
    }
    found = compare(OLD, plan_of(**{**nodes, **changed}), RECORD)
    assert [difference.sentence for difference in found] == sentences
    removed = compare(OLD, plan_of(**{name: each for name, each in nodes.items() if name != "each"}), RECORD)
    assert [(difference.node, difference.after) for difference in removed] == [("each", None)]


def test_a_cancellation_and_a_running_node_are_replayed():
    """F3: after the cancellation nothing starts; a node that still runs has no end."""
    plan = plan_of(a=node(), b=node("task", "a"), c=node())
    cancelled = Record(
        {"a": done(at=5, status=NodeStatus.CANCELLED)}, StopReason.CANCEL, NOW + timedelta(seconds=4)
    )
    assert {name: decided.status for name, decided in replay(plan, cancelled).items()} == {
        "a": NodeStatus.CANCELLED,
        "b": NodeStatus.BLOCKED,
        "c": NodeStatus.RUNNING,
    }
