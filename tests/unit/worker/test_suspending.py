"""The outcomes with which a task waits: returned by a handler, on the wire, and read again."""

import itertools

import orjson
import pytest

from penstock.cel import compile_expression
from penstock.contracts.inbound import decode_results
from penstock.contracts.result import StageResult, encode_results
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.flow.plan import NodeKind, Plan
from penstock.core.flow.waiting import waiting_definition
from penstock.core.task import State
from penstock.worker import Child, Spawn, Wait
from penstock.worker.suspending import read_suspending

FENCE = Fence(1, 0, "start", 0)


def on_the_wire(returned):
    outcome, fields = read_suspending(returned, str)
    result = StageResult(fence=FENCE, outcome=outcome, **fields)
    worker, [read], faults = decode_results(encode_results("w", [result]))
    assert (worker, faults) == ("w", [])
    assert (read.outcome, read.next_stage, read.terms) == (outcome, result.next_stage, result.terms)
    return orjson.loads(read.context.data), read


def test_children_and_terms_of_spawn_reach_the_stage_processor():
    """F6: each child names its type; fields that have their default are left out."""
    children = [Child("a", {"n": 1}), Child("b", stage="s", key="k", priority="HIGH")]
    context, read = on_the_wire(Spawn(children, "joined", context=7, k=1, parallel=2))
    assert context == {
        "context": 7,
        "children": [
            {"type": "a", "context": {"n": 1}},
            {"type": "b", "context": None, "stage": "s", "key": "k", "priority": "HIGH"},
        ],
    }
    plan = Plan.from_wire(waiting_definition(read.outcome, read.terms))
    [node] = plan.nodes.values()
    assert (node.kind, node.k, node.parallel) == (NodeKind.MAP, 1, 2)
    conclusion = conclude(FENCE, read.outcome)
    assert (conclusion.state, conclusion.stage, conclusion.step, conclusion.attempt) == (
        State.WAITING,
        "start",
        0,
        0,
    )


def test_all_children_may_fail_unless_k_must_succeed():
    """F6: the stage that follows decides what a failure means."""
    [node] = Plan.from_wire(waiting_definition(Outcome.SPAWN, {})).nodes.values()
    assert node.tolerate >= 1_000_000


@pytest.mark.parametrize(("key", "literal"), [("", None), ('a"b\n', '"a\\"b\\n"')])
def test_the_terms_of_wait_reach_the_stage_processor(key, literal):
    """F6: a key is text, and not an expression."""
    context, read = on_the_wire(Wait("paid", "then", key=key, timeout_s=5))
    assert context == {"context": None}
    [node] = waiting_definition(read.outcome, read.terms)["nodes"].values()
    assert (node["event"], node.get("key"), node["finish_within_s"]) == ("paid", literal, 5)


@pytest.mark.parametrize(
    "returned",
    [
        Spawn([{"type": "a"}], "then"),
        Spawn([Child("a b")], "then"),
        Spawn([Child("a", priority="URGENT")], "then"),
        Spawn([Child("a", key="")], "then"),
        Spawn([], "then", k=0),
        Spawn([], "then", parallel=100_001),
        Wait("", "then"),
        Wait("a b", "then"),
        Wait("a", "then", key="\0"),
        Wait("a", "then", timeout_s=0),
    ],
)
def test_wrong_fields_are_named(returned):
    """The handler's attempt fails with a precise error."""
    with pytest.raises(TypeError, match=r"Spawn|child|Wait"):
        read_suspending(returned, str)


@pytest.mark.parametrize("key", ["4711", 'a "b" \\ c\n', "\U0001f600"])
def test_the_key_of_a_wait_is_any_text(key):
    """F6: a key beyond U+FFFF was no expression, so the wait failed at once."""
    node = waiting_definition(Outcome.WAIT, {"event": "paid", "key": key})["nodes"]["event"]
    assert compile_expression(node["key"], frozenset()).evaluate({}) == key


def test_children_without_an_end_are_refused():
    """F6: a generator that never ends would take the memory of the worker."""
    endless = (Child("a") for _ in itertools.count())
    with pytest.raises(TypeError, match="more than 3 children"):
        read_suspending(Spawn(endless, "then"), str, 3)
    read_suspending(Spawn([Child("a")] * 3, "then"), str, 3)
