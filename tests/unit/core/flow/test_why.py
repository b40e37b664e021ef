"""Why a flow stands: each reason by its facts, and the path through child flows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from penstock.core.flow.plan import NodeKind
from penstock.core.flow.state import FlowStatus, Items, NodeStatus, StopReason
from penstock.core.flow.why import (
    COUNTED,
    LATE_S,
    FlowFacts,
    FlowReason,
    NodeFacts,
    followed_task,
    why,
    with_task,
)
from penstock.core.task import FINAL, State
from penstock.core.why import Facts, GroupLag, TaskWhy, WaitReason
from penstock.core.why import why as why_task

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def flow(**more):
    given = {
        "id": 1,
        "root_id": 1,
        "name": "nightly",
        "now": NOW,
        "status": FlowStatus.RUNNING,
        "since": NOW,
        "live": 1,
    }
    return FlowFacts(**(given | more))


def node(kind=NodeKind.TASK, **more):
    return NodeFacts(**({"name": "n", "kind": kind, "status": NodeStatus.RUNNING, "since": NOW} | more))


def ago(seconds):
    return NOW - timedelta(seconds=seconds)


MAP = Items(total=100, opened=60, succeeded=50, unsuccessful=7)
FAILED = node(status=NodeStatus.FAILED, reason="disk full", task=7, task_state="failed")

CASES = {
    "succeeded": (flow(status=FlowStatus.SUCCEEDED), FlowReason.ENDED, "it has succeeded"),
    "cancelled": (flow(status=FlowStatus.CANCELLED), FlowReason.ENDED, "it has been cancelled"),
    "failed": (
        flow(status=FlowStatus.FAILED, node=FAILED),
        FlowReason.FAILED,
        "it has failed, because node n failed (task 7, failed): disk full",
    ),
    "item failed": (
        flow(status=FlowStatus.FAILED, node=node(NodeKind.MAP, status=NodeStatus.FAILED, item=3, flow=9)),
        FlowReason.FAILED,
        "it has failed, because item 3 of node n failed (flow 9)",
    ),
    "child flow failed": (
        flow(
            status=FlowStatus.FAILED,
            node=node(NodeKind.FLOW, status=NodeStatus.FAILED, flow=9, reason="flow 9: node 'm' failed"),
        ),
        FlowReason.FAILED,
        "it has failed, because node n failed (flow 9)",
    ),
    "failed without a node": (
        flow(status=FlowStatus.FAILED, error="timeout_s is over"),
        FlowReason.ENDED,
        "it has failed: timeout_s is over",
    ),
    "paused": (
        flow(paused=True, live=2, node=node(task=7)),
        FlowReason.PAUSED,
        "it is paused until it is resumed; 2 nodes that run go on to the end",
    ),
    "task": (
        flow(node=node(task=7, task_state="ready"), live=3),
        FlowReason.TASK,
        "node n runs task 7 (ready); 2 other nodes run",
    ),
    "task that waits": (
        flow(node=node(task=7, task_state="waiting", flow=8)),
        FlowReason.TASK,
        "node n runs task 7 (waiting), which waits for flow 8",
    ),
    "task whose end is not applied": (
        flow(node=node(task=7, task_state="succeeded"), owner="host-1"),
        FlowReason.UNAPPLIED,
        "the end of task 7 (succeeded), of node n, is not applied yet, and waits for the service `flows` on host-1",
    ),
    "task whose end is not applied, no owner": (
        flow(node=node(task=7, task_state="failed"), unapplied=1, unapplied_since=ago(0.1)),
        FlowReason.UNAPPLIED,
        (
            "the end of task 7 (failed), of node n, is not applied yet, and no replica of the service `flows` "
            "owns its shard: is `flows` running?"
        ),
    ),
    "event": (
        flow(node=node(NodeKind.WAIT, event="approved", key="42", finish_by=NOW + timedelta(seconds=90))),
        FlowReason.EVENT,
        "node n waits for the event approved with the key 42; the node fails in 90 s if it has not ended",
    ),
    "run of another flow": (
        flow(node=node(NodeKind.WAIT, event="flow:load", key="2026-11-23T02:30:00Z")),
        FlowReason.EVENT,
        "node n waits for the run of flow 'load' of the tick 2026-11-23T02:30:00Z",
    ),
    "timer": (
        flow(node=node(NodeKind.TIMER, until=NOW + timedelta(hours=1))),
        FlowReason.TIMER,
        "node n waits 3,600 s more",
    ),
    "timer that nobody ended": (
        flow(node=node(NodeKind.TIMER, until=ago(60))),
        FlowReason.UNAPPLIED,
        "the time of node n was over 60 s ago, and no replica of the service `flows` owns its shard: is `flows` running?",
    ),
    "map": (
        flow(node=node(NodeKind.MAP, items=MAP, item=51, task=9, task_state="running")),
        FlowReason.MAP,
        (
            "node n has 3 of 100 items live, 50 have succeeded, 7 have not succeeded; the first live one is "
            "item 51, task 9 (running)"
        ),
    ),
    "map without a list": (
        flow(node=node(NodeKind.MAP)),
        FlowReason.STARTING,
        "node n is being started",
    ),
    "cancelling": (
        flow(stop=StopReason.CANCEL, node=node(task=7, task_state="running")),
        FlowReason.TASK,
        "it is being cancelled, and node n runs task 7 (running)",
    ),
    "failing": (
        flow(stop=StopReason.FAILURE, node=node(task=7, task_state="running"), failed=FAILED),
        FlowReason.TASK,
        "node n failed (disk full), nothing more starts, and node n runs task 7 (running)",
    ),
    "not applied, no owner": (
        flow(node=node(task=7), unapplied=1, unapplied_since=ago(LATE_S)),
        FlowReason.UNAPPLIED,
        "1 change of it is not applied yet, and no replica of the service `flows` owns its shard: is `flows` running?",
    ),
    "not applied, behind": (
        flow(unapplied=COUNTED + 1, unapplied_since=ago(80), owner="host-1"),
        FlowReason.UNAPPLIED,
        (
            "more than 10,000 changes of it are not applied yet, and the service `flows` on host-1 is behind: "
            "the oldest waits for 80 s"
        ),
    ),
    "just arrived": (
        flow(live=0, unapplied=1, unapplied_since=ago(0.1), owner="host-1"),
        FlowReason.UNAPPLIED,
        "1 change of it is not applied yet, and the service `flows` on host-1 is about to apply it",
    ),
    "stuck": (
        flow(live=0),
        FlowReason.STUCK,
        "nothing of it runs, and nothing is left to apply: `penstock check` reports such a flow",
    ),
}


@pytest.mark.parametrize(("facts", "reason", "sentence"), CASES.values(), ids=CASES)
def test_each_reason_has_its_sentence(facts, reason, sentence):
    """F2: the reason names the leaf that blocks. A change that is on its way hides no other
    reason."""
    [step] = why([facts])
    assert (step.reason, step.sentence) == (reason, sentence)
    assert step.flow == 1


def test_the_path_goes_through_child_flows_and_ends_at_a_pause():
    """F2: one step for each flow, down to the leaf; a pause and a change that is not applied hold
    everything below."""
    top = flow(node=node(NodeKind.FLOW, flow=2))
    middle = flow(id=2, node=node(NodeKind.MAP, items=MAP, item=51, flow=3))
    leaf = flow(id=3, node=node(NodeKind.WAIT, event="approved"))
    path = why([top, middle, leaf])
    assert [(step.flow, step.reason, step.item, step.child) for step in path] == [
        (1, FlowReason.FLOW, None, 2),
        (2, FlowReason.MAP, 51, 3),
        (3, FlowReason.EVENT, None, None),
    ]
    assert path[-1].sentence == "node n waits for the event approved"
    paused = flow(id=2, node=node(NodeKind.FLOW, flow=3), paused=True)
    assert [step.reason for step in why([top, paused, leaf])] == [FlowReason.FLOW, FlowReason.PAUSED]
    late = flow(id=2, node=node(NodeKind.FLOW, flow=3), unapplied=1, unapplied_since=ago(9))
    assert [step.reason for step in why([top, late, leaf])] == [FlowReason.FLOW, FlowReason.UNAPPLIED]


def answer(state=State.READY, **facts):
    """The answer about task 7 of the type `a`, by its facts."""
    given = {"now": NOW, "state": state, "since": NOW, "owner": "host-1", "group": GroupLag(1, 0)}
    return TaskWhy(7, "a", state, why_task(Facts(**(given | facts))))


TASKS = {
    "no room in the type": (
        answer(in_flight=8, max_in_flight=8),
        WaitReason.LIMIT_IN_FLIGHT,
        "8 tasks of its type are in flight, of at most 8",
    ),
    "no room for the key": (
        answer(concurrency_key="acme", key_in_flight=2, key_limit=2),
        WaitReason.KEY_TAKEN,
        "2 tasks of its key, acme, are in flight, of at most 2",
    ),
    "rate": (answer(starts_per_s=5), WaitReason.LIMIT_STARTS, "its type may start 5 tasks a second"),
    "paused type": (answer(type_paused=True), WaitReason.TYPE_PAUSED, "its type is paused"),
    "no worker": (
        answer(group=GroupLag(0, 0)),
        WaitReason.NO_WORKER,
        "no worker reads the ready topic of its type",
    ),
}


@pytest.mark.parametrize(("task", "reason", "sentence"), TASKS.values(), ids=TASKS)
def test_a_task_at_the_end_of_the_path_says_why_it_waits(task, reason, sentence):
    """F2, S8: the last step says why the task of a node, or of an item, waits. The reason and the
    sentence are those of the task alone."""
    top = flow(node=node(NodeKind.FLOW, flow=2))
    levels = [top, flow(id=2, live=3, node=node(task=7, task_state="ready"))]
    assert followed_task(levels) == 7
    first, last = why(with_task(levels, task))
    assert (first, last.reason, last.task) == (why(levels)[0], FlowReason.TASK, 7)
    assert task.answer.reason is reason
    assert last.sentence == f"node n runs task 7 (a, ready): {sentence}; 2 other nodes run"
    item = [flow(node=node(NodeKind.MAP, items=MAP, item=51, task=7, task_state="ready"))]
    [step] = why(with_task(item, task))
    assert step.sentence.endswith(f"; the first live one is item 51, task 7 (a, ready): {sentence}")


def test_only_a_live_task_at_the_end_of_the_path_is_followed():
    """F2: a pause, another leaf, a task that waits for a flow and a task that has ended need no
    answer about a task."""
    leaf = flow(id=2, node=node(NodeKind.WAIT, event="approved"))
    assert followed_task([flow(paused=True, node=node(task=7))]) is None
    assert followed_task([flow(node=node(task=7, task_state="waiting", flow=2)), leaf]) is None
    for state in FINAL:
        assert followed_task([flow(node=node(task=7, task_state=state))]) is None
        item = node(NodeKind.MAP, items=MAP, item=51, task=7, task_state=state)
        assert followed_task([flow(node=item)]) is None
    assert followed_task([flow(status=FlowStatus.FAILED, node=FAILED)]) is None


def test_a_task_that_ends_between_the_queries_waits_for_its_end_to_be_applied():
    """F2: the state of the later query counts."""
    levels = with_task([flow(node=node(task=7, task_state="ready"), owner="host-1")], answer(State.SUCCEEDED))
    [step] = why(levels)
    assert (step.reason, step.figures["task_state"]) == (FlowReason.UNAPPLIED, State.SUCCEEDED)
    assert step.sentence.startswith("the end of task 7 (succeeded), of node n, is not applied yet")
    assert followed_task(levels) is None
