"""Replays the messages of a flow against another version: which decisions would differ. Pure.

A record has, for each node, how it ended and when, the case that a switch took, and how many items
of a map succeeded. A replay applies these in the order of the ends to the plan of a version, by the
same `decide` as the owner of flows. Two versions agree if they start the same nodes after the same
ends, and end them alike.

No expression is evaluated: a switch takes its recorded case. A map with other bounds is decided by
its recorded items. Child flows count as one node. After a recovery, the last run of each node
counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from penstock.core.flow import fan_out
from penstock.core.flow.decide import decide, initial
from penstock.core.flow.messages import Began, Cancelled, Chosen, Ended, LimitReached, Message, Start
from penstock.core.flow.plan import NodeKind, NodePlan, Plan
from penstock.core.flow.state import Items, Limit, NodeStatus, Outcome, StopReason

_OUTCOMES = {
    NodeStatus.SUCCEEDED: Outcome.SUCCEEDED,
    NodeStatus.FAILED: Outcome.FAILED,
    NodeStatus.CANCELLED: Outcome.CANCELLED,
}
_LAST = datetime.max.replace(tzinfo=UTC)
# Limits have their effect in the record, so their moments do not matter.
_NOW = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RecordedNode:
    """A node that has started.

    Attributes:
        kind: its kind.
        status: its state.
        ended_at: when it ended; None while it runs.
        timed_out: whether a limit ended it.
        case: of a switch: the case that it took.
        total: of a map: items of its list; None without a list.
        succeeded: of a map: items that succeeded.
        unsuccessful: of a map: items that failed or were cancelled.
    """

    kind: NodeKind
    status: NodeStatus
    ended_at: datetime | None = None
    timed_out: bool = False
    case: str | None = None
    total: int | None = None
    succeeded: int = 0
    unsuccessful: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A flow that has run.

    Attributes:
        nodes: the nodes that have started, by name.
        stop: `CANCEL` or `TIMEOUT` if one of these has ended the flow.
        stopped_at: about when that was.
    """

    nodes: Mapping[str, RecordedNode]
    stop: StopReason | None = None
    stopped_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions about one node.

    Attributes:
        status: its state in the end; `RUNNING` if the record does not have its end.
        after: the nodes whose end started it; none for the start of the flow, None if it did not
            start.
    """

    status: NodeStatus
    after: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """A node about which two versions decide differently.

    Attributes:
        node: its name.
        before: the decisions of the version that has run; None if it has no such node.
        after: the decisions of the other version; None if it has no such node.
    """

    node: str
    before: Decided | None
    after: Decided | None

    @property
    def sentence(self) -> str:
        """The difference, for people."""
        return f"node {self.node} {_phrase(self.before)}; in the other version it {_phrase(self.after)}"


def compare(plan: Plan, other: Plan, record: Record) -> list[Difference]:
    """The nodes about which two versions decide differently, in the order of their definitions.

    Args:
        plan: the version that has run.
        other: the other version.
        record: what has happened.
    """
    before, after = replay(plan, record), replay(other, record)
    return [
        Difference(name, before.get(name), after.get(name))
        for name in dict.fromkeys([*plan.nodes, *other.nodes])
        if before.get(name) != after.get(name)
    ]


def replay(plan: Plan, record: Record) -> dict[str, Decided]:
    """The decisions of a version about each of its nodes."""
    run = _Run(plan, record)
    run.to_the_end()
    return {name: Decided(node.status, run.started.get(name)) for name, node in run.nodes.items()}


@dataclass
class _Run:
    plan: Plan
    record: Record
    started: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flow, nodes = initial(self.plan)
        self.nodes = dict(nodes)
        self._due: list[tuple[datetime, int, Message]] = []
        self._count = 0

    def to_the_end(self) -> None:
        """Applies the record until it has nothing more."""
        if self.record.stop is StopReason.CANCEL:
            self._add(self.record.stopped_at, Cancelled())
        elif self.record.stop is StopReason.TIMEOUT:
            self._add(self.record.stopped_at, LimitReached(None, 0, Limit.TIMEOUT))
        self._decide([Began()])
        while self._due:
            self._decide([*self._next()])

    def _next(self) -> Iterable[Message]:
        """The ends of the next moment: they were in one transaction of the owner."""
        at = self._due[0][0]
        while self._due and self._due[0][0] == at:
            yield heapq.heappop(self._due)[2]

    def _decide(self, messages: list[Message]) -> None:
        # Every row is given, so the decision asks for no visit of others.
        decision = decide(self.plan, self.flow, messages, _NOW, nodes=self.nodes)
        ended = {message.node for message in messages if isinstance(message, Ended | Chosen)}
        self.flow = decision.flow
        self.nodes |= decision.nodes
        for action in decision.actions:
            if isinstance(action, Start):
                sources = ended & {edge.source for edge in self.plan.nodes[action.node].edges}
                self.started[action.node] = tuple(sorted(sources or ended))
                self._start(action)

    def _start(self, action: Start) -> None:
        recorded = self.record.nodes.get(action.node)
        if recorded is None or recorded.kind != action.kind:
            # The record does not say how it would end.
            return
        status = _status(self.plan.nodes[action.node], recorded)
        if status not in _OUTCOMES:
            return
        if status is NodeStatus.SUCCEEDED and recorded.case is not None:
            self._add(recorded.ended_at, Chosen(action.node, action.generation, recorded.case))
        else:
            self._add(recorded.ended_at, Ended(action.node, action.generation, _OUTCOMES[status]))

    def _add(self, at: datetime | None, message: Message) -> None:
        # The number keeps the order of those with the same moment.
        heapq.heappush(self._due, (at or _LAST, self._count, message))
        self._count += 1


def _status(plan: NodePlan, recorded: RecordedNode) -> NodeStatus:
    """How a recorded node ends in a version; `RUNNING` if the record does not say."""
    by_items = recorded.status in (NodeStatus.SUCCEEDED, NodeStatus.FAILED) and not recorded.timed_out
    if recorded.total is None or not by_items:
        return recorded.status
    opened = recorded.succeeded + recorded.unsuccessful
    items = Items(recorded.total, opened, recorded.succeeded, recorded.unsuccessful)
    if fan_out.is_enough(plan, items):
        return NodeStatus.SUCCEEDED
    if fan_out.cannot_succeed(plan, items):
        return NodeStatus.FAILED
    return NodeStatus.SUCCEEDED if opened == recorded.total else NodeStatus.RUNNING


_NOT_STARTED = {NodeStatus.SKIPPED: "is skipped", NodeStatus.BLOCKED: "is blocked"}


def _phrase(decided: Decided | None) -> str:
    if decided is None:
        return "does not exist"
    if decided.after is None:
        return _NOT_STARTED.get(decided.status, "does not start")
    start = f"starts after {' and '.join(decided.after)}" if decided.after else "starts at once"
    if decided.status is NodeStatus.RUNNING:
        return f"{start}, and the record does not have its end"
    return f"{start}, and ends as {decided.status}"
