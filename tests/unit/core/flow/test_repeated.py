"""Decisions that repeat equal those that are made anew."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.core.flow import repeated
from penstock.core.flow.decide import decide, initial
from penstock.core.flow.messages import Began, Ended, Paused
from penstock.core.flow.plan import Plan
from penstock.core.flow.repeated import RepeatedDecisions
from penstock.core.flow.state import NodeStatus, Outcome

NOW = datetime(2026, 11, 24, tzinfo=UTC)
LATER = datetime(2026, 11, 25, tzinfo=UTC)


@pytest.fixture
def decisions(monkeypatch):
    """Counts the decisions that are made."""
    made = []

    def counted(*arguments, **rows):
        made.append(arguments)
        return decide(*arguments, **rows)

    monkeypatch.setattr(repeated, "decide", counted)
    return made


def plan(**fields):
    """A chain of two tasks."""
    nodes = {"a": {"kind": "task", "type": "t"}, "b": {"kind": "task", "type": "t", "after": ["a"]}}
    return Plan.from_wire({"nodes": nodes, **fields})


def run(chain, decided):
    """Begins a flow and ends its first node; returns both decisions."""
    flow, nodes = initial(chain)
    first = decided.decide(flow, [Began()], NOW, nodes=nodes)
    nodes = {**nodes, **first.nodes}
    return first, decided.decide(first.flow, [Ended("a", 0, Outcome.SUCCEEDED)], NOW, nodes=nodes)


def test_the_same_question_is_decided_once(decisions):
    """A second flow in the same states gets the decisions of the first."""
    chain = plan()
    decided = RepeatedDecisions(chain)
    answers = run(chain, decided)
    assert answers[1].nodes["b"].status is NodeStatus.RUNNING
    assert run(chain, decided) == answers
    assert len(decisions) == 2


@pytest.mark.parametrize("fields", [{"timeout_s": 5}, {"warn_after_s": 5}])
def test_a_decision_with_a_limit_follows_the_clock(decisions, fields):
    """The moment of a limit is that of its own decision."""
    chain = plan(**fields)
    decided = RepeatedDecisions(chain)
    flow, nodes = initial(chain)
    moments = {
        action.at
        for now in (NOW, LATER)
        for action in decided.decide(flow, [Began()], now, nodes=nodes).actions
        if hasattr(action, "at")
    }
    assert len(moments) == len(decisions) == 2


def test_edges_that_arrived_and_reasons_make_a_difference(decisions):
    """Rows that differ in one column are different questions, and each failure keeps its reason."""
    chain = plan(on_failure="continue")
    decided = RepeatedDecisions(chain)
    first, _ = run(chain, decided)
    nodes = dict(first.nodes) | {"b": initial(chain)[1]["b"]}
    for number in range(2):
        failed = Ended("a", 0, Outcome.FAILED, f"task {number} failed")
        decision = decided.decide(first.flow, [failed], NOW, nodes=nodes)
        assert decision.nodes["a"].reason == f"task {number} failed"
    paused = decided.decide(first.flow, [Paused()], NOW, nodes=nodes)
    assert paused.flow.paused
    ended = decided.decide(first.flow, [Ended("a", 0, Outcome.CANCELLED)], NOW, nodes=nodes)
    assert ended.nodes["a"].status is NodeStatus.CANCELLED


def test_what_is_kept_has_a_limit(decisions, monkeypatch):
    """Flows in ever new states do not fill the memory."""
    monkeypatch.setattr(repeated, "_KEPT", 10)
    chain = plan()
    decided = RepeatedDecisions(chain)
    flow, nodes = initial(chain)
    for generation in range(25):
        state = flow._replace(generation=generation)
        assert decided.decide(state, [Began()], NOW, nodes=nodes).flow.generation == generation
    assert len(decided._found) <= 10
