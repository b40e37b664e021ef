"""The decision of a flow: rows and messages in, rows and actions out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from penstock.core.flow import fan_out
from penstock.core.flow.messages import (
    Action,
    Began,
    Cancelled,
    Chosen,
    Ended,
    ItemEnded,
    LimitReached,
    Listed,
    Message,
    Paused,
    Recovered,
    Resumed,
    Visited,
    Warn,
)
from penstock.core.flow.plan import NodeKind, Plan
from penstock.core.flow.recovery import recover
from penstock.core.flow.state import (
    FlowState,
    FlowStatus,
    Items,
    Limit,
    NodeState,
    NodeStatus,
    Outcome,
    StopReason,
)
from penstock.core.flow.working import Working

_STATUS = {
    Outcome.SUCCEEDED: NodeStatus.SUCCEEDED,
    Outcome.FAILED: NodeStatus.FAILED,
    Outcome.CANCELLED: NodeStatus.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """The changes that a decision makes.

    Attributes:
        flow: the flow's row.
        nodes: the rows of nodes that have changed, by name.
        actions: what the owner must do in the same transaction.
        visit: nodes to be visited (`Visited`) in the same transaction, with the rows of their
            successors; the decision lacked those.
        visit_eligible: whether all ready nodes and running maps must be visited in the same
            transaction.
        later: maps to be visited in a later transaction: they have more items to open.
    """

    flow: FlowState
    nodes: Mapping[str, NodeState]
    actions: tuple[Action, ...]
    visit: frozenset[str]
    visit_eligible: bool
    later: frozenset[str]


def initial(plan: Plan) -> tuple[FlowState, Mapping[str, NodeState]]:
    """The rows of a flow that has not begun."""
    return FlowState(unfinished=len(plan.nodes)), {name: NodeState() for name in plan.nodes}


def rows(plan: Plan, messages: Iterable[Message]) -> frozenset[str]:
    """The nodes whose rows `decide` needs: those that messages touch, and their successors."""
    touched: set[str] = set()
    for message in messages:
        match message:
            case Recovered():
                return frozenset(plan.nodes)
            case Began():
                touched.update(plan.roots)
            case Paused() | Resumed() | Cancelled() | LimitReached(node=None):
                pass
            case _:
                touched.add(message.node or "")
    return frozenset(touched.union(*(plan.successors[name] for name in touched)))


def decide(
    plan: Plan,
    flow: FlowState,
    messages: Iterable[Message],
    now: datetime,
    *,
    nodes: Mapping[str, NodeState],
) -> Decision:
    """Applies messages to a flow.

    Endings are applied before limits, and limits before commands, so an ending counts that is
    there when a command arrives. Starts come last. Commands keep their order.

    Args:
        plan: the definition that the flow is pinned to.
        flow: the flow's row.
        messages: what the flow has received, in any order.
        now: the moment.
        nodes: at least the rows that `rows` names.

    Returns:
        the changes; messages that are stale, or applied before, cause none.
    """
    working = Working(plan, flow, nodes, now)
    others: list[Message] = []
    item_ends: dict[tuple[str, int, int], ItemEnded] = {}
    for message in messages:
        if isinstance(message, ItemEnded):
            item_ends.setdefault((message.node, message.index, message.generation), message)
        else:
            others.append(message)
    if flow.status is FlowStatus.RUNNING:
        _end_items(working, item_ends.values())
    for message in sorted(others, key=_rank):
        # Nothing but a recovery changes a flow that has ended.
        if working.flow.status is FlowStatus.RUNNING or isinstance(message, Recovered):
            _apply(working, message)
    if working.flow.status is FlowStatus.RUNNING:
        working.settle()
    return Decision(
        flow=working.flow,
        nodes={name: node for name, node in working.nodes.items() if nodes.get(name) != node},
        actions=tuple(working.actions),
        visit=frozenset(working.visit),
        visit_eligible=working.visit_eligible,
        later=frozenset(working.later),
    )


def _rank(message: Message) -> int:
    if isinstance(message, Paused | Resumed | Cancelled | Recovered):
        return 2
    return 1 if isinstance(message, LimitReached) else 0


def _apply(working: Working, message: Message) -> None:  # noqa: C901, PLR0912 (one case per message)
    match message:
        case Began():
            _begin(working)
        case Ended(name, generation, _, _):
            if working.is_current(name, generation):
                _end(working, message)
        case Chosen(name, generation, case):
            if working.is_current(name, generation):
                working.end(name, NodeStatus.SUCCEEDED, case=case)
        case Listed(name, generation, total):
            if working.is_current(name, generation) and working.nodes[name].items is None:
                _list(working, name, total)
        case LimitReached():
            _reach(working, message)
        case Visited(name):
            _visit(working, name)
        case Paused():
            working.flow = working.flow._replace(paused=True)
        case Resumed():
            working.visit_eligible |= working.flow.paused
            working.flow = working.flow._replace(paused=False)
        case Cancelled():
            working.stop(StopReason.CANCEL)
        case Recovered():
            recover(working, message)


def _begin(working: Working) -> None:
    pending = [name for name in working.plan.roots if working.nodes[name].status is NodeStatus.PENDING]
    for name in pending:
        working.evaluate_join(name)
    if pending:
        working.set_flow_limits()


def _end(working: Working, ended: Ended) -> None:
    node = working.nodes[ended.node]
    if node.items is not None:
        # A map with a list ends by its items.
        return
    if ended.outcome is Outcome.CANCELLED and node.timed_out is not None:
        working.end(ended.node, NodeStatus.FAILED, reason=f"{node.timed_out}_s is over")
    else:
        working.end(ended.node, _STATUS[ended.outcome], reason=ended.reason)


def _list(working: Working, name: str, total: int) -> None:
    working.nodes[name] = working.nodes[name]._replace(items=Items(total=total))
    working.touch_map(name)


def _end_items(working: Working, ends: Iterable[ItemEnded]) -> None:
    # Thousands may end in one decision, so each map is changed once.
    counts: dict[str, Counter[Outcome]] = {}
    for ended in ends:
        if working.is_current(ended.node, ended.generation):
            counts.setdefault(ended.node, Counter())[ended.outcome] += 1
    for name, counted in counts.items():
        node = working.nodes[name]
        if node.items is not None:
            working.nodes[name] = node._replace(items=fan_out.count_ends(node.items, counted))
            working.touch_map(name)


def _reach(working: Working, reached: LimitReached) -> None:
    if reached.node is None:
        if reached.generation == working.flow.generation:
            if reached.limit is Limit.WARN_AFTER:
                working.actions.append(Warn(None, reached.generation))
            else:
                working.stop(StopReason.TIMEOUT)
    elif working.is_current(reached.node, reached.generation):
        node = working.nodes[reached.node]
        if reached.limit is Limit.WARN_AFTER:
            working.actions.append(Warn(reached.node, reached.generation))
        elif node.timed_out is None:
            working.time_out(reached.node, reached.limit)


def _visit(working: Working, name: str) -> None:
    node = working.nodes[name]
    if node.is_final:
        working.propagate(name)
    elif working.plan.nodes[name].kind is NodeKind.MAP:
        working.touch_map(name)
