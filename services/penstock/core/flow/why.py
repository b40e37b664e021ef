"""Why a flow has not ended, or why it failed: the path from the flow to the leaf that blocks. Pure.

Each step of the path is one flow. A flow with several running nodes is followed through the one
that started first. The path ends early at a pause, which holds everything below it, and at a flow
about which the service `flows` has not applied everything.

The path may end at a task. `core.why` decides why that task waits, and its answer becomes
a part of the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from penstock.core.flow import tick_wait
from penstock.core.flow.plan import NodeKind
from penstock.core.flow.state import FlowStatus, Items, NodeStatus, StopReason
from penstock.core.task import FINAL
from penstock.core.why import TaskWhy

# Rows of the inbox are counted up to this number.
COUNTED = 10_000
# The service `flows` applies a row within milliseconds. An older one shows that it is away, or
# behind.
LATE_S = 5.0


class FlowReason(StrEnum):
    """The reason, as the API names it."""

    ENDED = "ended"
    FAILED = "failed"
    UNAPPLIED = "unapplied"
    PAUSED = "paused"
    TASK = "task"
    FLOW = "flow"
    EVENT = "event"
    TIMER = "timer"
    MAP = "map"
    STARTING = "starting"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts about the node through which a flow is followed.

    Attributes:
        name: its name.
        kind: its kind.
        status: its state.
        since: when it started, or ended.
        reason: why it failed.
        items: the counters of a map whose list is known.
        item: of a map: the item that is followed.
        task: id of its task, or of the item's.
        task_state: state of that task.
        task_why: why that task waits; None unless the path ends at it.
        flow: id of its child flow, or of the item's; of a task that waits: the flow that wakes it.
        event: of a wait: the name of the event.
        key: of a wait: the key of the event; empty without one.
        until: of a timer: its end.
        finish_by: when a limit ends it; None without one.
    """

    name: str
    kind: NodeKind
    status: NodeStatus
    since: datetime | None = None
    reason: str = ""
    items: Items | None = None
    item: int | None = None
    task: int | None = None
    task_state: str | None = None
    task_why: TaskWhy | None = None
    flow: int | None = None
    event: str | None = None
    key: str = ""
    until: datetime | None = None
    finish_by: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFacts:
    """The facts about one flow of the path, at one moment.

    Attributes:
        id: its id.
        root_id: the flow at the top of its family.
        name: name of its definition.
        now: the moment.
        status: its state.
        since: when it ended, or when its row last changed.
        paused: whether it is paused.
        stop: why it starts nothing more.
        live: its nodes that run.
        error: why it failed.
        unapplied: rows about it in the inbox, up to `COUNTED`.
        unapplied_since: when the oldest of these rows was written.
        owner: the replica of the service `flows` that owns its shard; None without an owner.
        recovering: whether it has ended, and an accepted recovery is not applied yet.
        node: the node that is followed; None if no node runs, or has failed in a flow that failed.
        failed: the first node that failed while others run on.
    """

    id: int
    root_id: int
    name: str
    now: datetime
    status: FlowStatus
    since: datetime
    paused: bool = False
    stop: StopReason | None = None
    live: int = 0
    error: str | None = None
    unapplied: int = 0
    unapplied_since: datetime | None = None
    owner: str | None = None
    recovering: bool = False
    node: NodeFacts | None = None
    failed: NodeFacts | None = None

    @property
    def unapplied_s(self) -> float:
        """The age of the oldest row about it in the inbox, in seconds."""
        if self.unapplied_since is None:
            return 0.0
        return max(0.0, (self.now - self.unapplied_since).total_seconds())


@dataclass(frozen=True, slots=True)
class Step:
    """One flow of the path.

    Attributes:
        flow: its id.
        name: name of its definition.
        node: the node that is followed; None for the flow itself.
        item: item of a map.
        task: the task that the path leads to.
        child: the flow that the path leads to.
        reason: for programs.
        sentence: for people.
        figures: the facts behind it, by name; see `FlowFigures` in the API's description.
    """

    flow: int
    name: str
    node: str | None
    item: int | None
    task: int | None
    child: int | None
    reason: FlowReason
    sentence: str
    figures: Mapping[str, Any]


def why(levels: Sequence[FlowFacts]) -> tuple[Step, ...]:
    """Decides the path.

    Args:
        levels: the flow that is asked about, then the child flow of the node of each one before.

    Returns:
        the steps, at least one; the last one names what blocks.
    """
    path: list[Step] = []
    for flow in levels:
        step = _step(flow)
        path.append(step)
        if step.child is None:
            break
    return tuple(path)


def followed_task(levels: Sequence[FlowFacts]) -> int | None:
    """The task at the end of the path, if it has not ended: at most one for a path."""
    path = why(levels)
    node = levels[len(path) - 1].node
    if path[-1].reason not in _OF_TASKS or node is None or node.task_state in FINAL:
        return None
    return path[-1].task


_OF_TASKS = (FlowReason.TASK, FlowReason.MAP)


def with_task(levels: Sequence[FlowFacts], task: TaskWhy) -> tuple[FlowFacts, ...]:
    """The facts with those about the followed task, whose state may have changed since."""
    leaf = len(why(levels)) - 1
    node = levels[leaf].node
    assert node is not None
    node = replace(node, task_state=task.state, task_why=task)
    return (*levels[:leaf], replace(levels[leaf], node=node))


def _step(flow: FlowFacts) -> Step:
    if flow.unapplied and (flow.recovering or flow.unapplied_s >= LATE_S):
        return _unapplied(flow)
    if flow.status is not FlowStatus.RUNNING:
        return _ended(flow)
    if flow.paused:
        return _of_flow(flow, FlowReason.PAUSED, f"it is paused until it is resumed{_running_on(flow)}")
    if flow.node is not None:
        return _running(flow, flow.node)
    if flow.unapplied:
        return _unapplied(flow)
    sentence = "nothing of it runs, and nothing is left to apply: `penstock check` reports such a flow"
    return _of_flow(flow, FlowReason.STUCK, sentence)


def _of_flow(flow: FlowFacts, reason: FlowReason, sentence: str, **figures: Any) -> Step:
    shown = {"since": flow.since, **_without_none(live=flow.live or None, **figures)}
    return Step(flow.id, flow.name, None, None, None, None, reason, sentence, shown)


def _unapplied(flow: FlowFacts) -> Step:
    number = f"more than {COUNTED:,}" if flow.unapplied > COUNTED else f"{flow.unapplied:,}"
    rows = f"{number} change{'' if flow.unapplied == 1 else 's'}"
    if flow.owner is None:
        rest = _NO_OWNER
    elif flow.unapplied_s >= LATE_S:
        rest = (
            f"the service `flows` on {flow.owner} is behind: the oldest waits for {flow.unapplied_s:,.0f} s"
        )
    else:
        rest = (
            f"the service `flows` on {flow.owner} is about to apply {'it' if flow.unapplied == 1 else 'them'}"
        )
    return _of_flow(
        flow,
        FlowReason.UNAPPLIED,
        f"{rows} of it {'is' if flow.unapplied == 1 else 'are'} not applied yet, and {rest}",
        unapplied=min(flow.unapplied, COUNTED),
        unapplied_s=flow.unapplied_s,
        owner=flow.owner,
    )


_NO_OWNER = "no replica of the service `flows` owns its shard: is `flows` running?"


def _ended(flow: FlowFacts) -> Step:
    node = flow.node
    if flow.status is not FlowStatus.FAILED or node is None:
        error = f": {flow.error}" if flow.error else ""
        return _of_flow(flow, FlowReason.ENDED, f"it has {_ENDS[flow.status]}{error}")
    # The reason of a child flow is that of the step below.
    follows = node.flow is not None and node.reason.startswith(f"flow {node.flow}: ")
    reason = f": {node.reason}" if node.reason and not follows else ""
    item = f"item {node.item:,} of " if node.item is not None else ""
    leads = ""
    if node.flow is not None:
        leads = f" (flow {node.flow})"
    elif node.task is not None:
        leads = f" (task {node.task}, {node.task_state})"
    sentence = f"it has failed, because {item}node {node.name} {_ENDED[node.status]}{leads}{reason}"
    return _of_node(flow, node, FlowReason.FAILED, sentence)


_ENDS = {
    FlowStatus.SUCCEEDED: "succeeded",
    FlowStatus.FAILED: "failed",
    FlowStatus.CANCELLED: "been cancelled",
}
_ENDED = {
    NodeStatus.FAILED: "failed",
    NodeStatus.CANCELLED: "was cancelled",
    NodeStatus.BLOCKED: "is blocked",
}


def _running(flow: FlowFacts, node: NodeFacts) -> Step:
    match node.kind:
        case NodeKind.WAIT if node.event is not None and node.event.startswith(tick_wait.PREFIX):
            # No event that a user sends has such a name.
            awaited = node.event.removeprefix(tick_wait.PREFIX)
            reason = FlowReason.EVENT
            sentence = f"node {node.name} waits for the run of flow {awaited!r} of the tick {node.key}"
        case NodeKind.WAIT:
            key = f" with the key {node.key}" if node.key else ""
            reason, sentence = FlowReason.EVENT, f"node {node.name} waits for the event {node.event}{key}"
        case NodeKind.TIMER if node.until is not None:
            left_s = (node.until - flow.now).total_seconds()
            if left_s <= -LATE_S:
                return _late(flow, node, -left_s)
            reason, sentence = FlowReason.TIMER, f"node {node.name} waits {max(0.0, left_s):,.0f} s more"
        case NodeKind.MAP if node.items is not None:
            reason, sentence = FlowReason.MAP, f"node {node.name} {_map(node.items)}{_first_live_item(node)}"
        case _ if node.task is not None and node.task_state in FINAL:
            return _end_unapplied(flow, node)
        case _ if node.task is not None:
            waits = f", which waits for flow {node.flow}" if node.flow is not None else ""
            reason = FlowReason.TASK
            sentence = f"node {node.name} runs {_task(node, waits)}"
        case _ if node.flow is not None:
            reason, sentence = FlowReason.FLOW, f"node {node.name} runs flow {node.flow}"
        case _:
            reason, sentence = FlowReason.STARTING, f"node {node.name} is being started"
    return _of_node(flow, node, reason, _stopping(flow) + sentence + _limited(flow, node))


def _late(flow: FlowFacts, node: NodeFacts, late_s: float) -> Step:
    service = _NO_OWNER if flow.owner is None else f"the service `flows` on {flow.owner} is behind"
    sentence = f"the time of node {node.name} was over {late_s:,.0f} s ago, and {service}"
    return _of_node(flow, node, FlowReason.UNAPPLIED, sentence)


def _end_unapplied(flow: FlowFacts, node: NodeFacts) -> Step:
    service = _NO_OWNER if flow.owner is None else f"waits for the service `flows` on {flow.owner}"
    sentence = f"the end of {_task(node)}, of node {node.name}, is not applied yet, and {service}"
    return _of_node(flow, node, FlowReason.UNAPPLIED, sentence)


def _task(node: NodeFacts, waits: str = "") -> str:
    """The task of a node, with the reason why it waits."""
    found = node.task_why
    if found is None or found.state in FINAL:
        return f"task {node.task} ({node.task_state}){waits}"
    # The sentence about a task that waits for a flow names the flow.
    return f"task {found.id} ({found.type}, {found.state}): {found.answer.sentence}"


def _of_node(flow: FlowFacts, node: NodeFacts, reason: FlowReason, sentence: str) -> Step:
    items = node.items
    counts = {}
    if items is not None:
        counts = {
            "total": items.total,
            "opened": items.opened,
            "live_items": items.live,
            "succeeded": items.succeeded,
            "unsuccessful": items.unsuccessful,
        }
    figures = _without_none(
        live=flow.live or None,
        event=node.event,
        key=node.key or None,
        due_at=node.until,
        finish_by=node.finish_by,
        task_state=node.task_state,
        owner=flow.owner if reason is FlowReason.UNAPPLIED else None,
        **counts,
    )
    shown = {"since": node.since or flow.since, **figures}
    return Step(flow.id, flow.name, node.name, node.item, node.task, node.flow, reason, sentence, shown)


def _map(items: Items) -> str:
    live = f"has {items.live:,} of {items.total:,} items live"
    ended = [f"{items.succeeded:,} have succeeded"] if items.succeeded else []
    ended += [f"{items.unsuccessful:,} have not succeeded"] if items.unsuccessful else []
    return ", ".join([live, *ended])


def _first_live_item(node: NodeFacts) -> str:
    if node.item is None:
        return ""
    task = f", {_task(node)}" if node.task is not None else ""
    flow = f", flow {node.flow}" if node.flow is not None else ""
    return f"; the first live one is item {node.item:,}{task}{flow}"


def _stopping(flow: FlowFacts) -> str:
    if flow.stop is StopReason.CANCEL:
        return "it is being cancelled, and "
    if flow.stop is StopReason.TIMEOUT:
        return "its time is over, and "
    if flow.stop is StopReason.FAILURE and flow.failed is not None:
        failed = flow.failed
        reason = f" ({failed.reason})" if failed.reason else ""
        return f"node {failed.name} {_ENDED[failed.status]}{reason}, nothing more starts, and "
    return ""


def _limited(flow: FlowFacts, node: NodeFacts) -> str:
    others = flow.live - 1
    more = f"; {others:,} other node{' runs' if others == 1 else 's run'}" if others > 0 else ""
    if node.finish_by is None:
        return more
    left_s = max(0.0, (node.finish_by - flow.now).total_seconds())
    return f"; the node fails in {left_s:,.0f} s if it has not ended{more}"


def _running_on(flow: FlowFacts) -> str:
    if not flow.live:
        return ""
    return f"; {flow.live:,} node{' that runs goes' if flow.live == 1 else 's that run go'} on to the end"


def _without_none(**figures: Any) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value is not None}
