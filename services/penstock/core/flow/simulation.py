"""Runs a flow on a clock of its own, with assumed durations and outcomes.

It uses the same `decide` as real flows will, so a definition does here what it does there. It
evaluates no expression: the cases of switches and the lengths of lists are assumed as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from penstock.core.flow.decide import Decision, decide, initial
from penstock.core.flow.messages import (
    Action,
    Began,
    CancelLive,
    CancelNode,
    Chosen,
    Ended,
    EndFlow,
    ItemEnded,
    LimitReached,
    Listed,
    Message,
    OpenItems,
    SetLimit,
    Start,
    Visited,
    Warn,
)
from penstock.core.flow.plan import NodeKind, Plan
from penstock.core.flow.state import FlowStatus, Limit, NodeStatus, Outcome

_START = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Assumption:
    """The assumptions about one node.

    Attributes:
        takes_s: seconds from its start to its end; of a map, from the start to the end of an item.
        outcome: how it ends.
        case: the case of a switch.
        items: the length of a map's list.
        failing: the items of a map that fail, by index.
    """

    takes_s: float
    outcome: Outcome = Outcome.SUCCEEDED
    case: str = ""
    items: int = 1
    failing: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Span:
    """One node of a simulated flow.

    Attributes:
        node: its name.
        status: its state in the end.
        started_s: seconds from the start of the flow to that of the node; None if it did not start.
        ended_s: the same for its end; None if it has none.
    """

    node: str
    status: NodeStatus
    started_s: float | None
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated flow.

    Attributes:
        status: how it ended.
        takes_s: seconds from its start to its end.
        spans: the nodes, in the order of their starts; those that did not start come last.
        critical_path: the nodes that decided when the flow ended, in the order of running.
        slots: the most tasks that ran at the same time, without those of child flows.
        late: nodes that were reported by `warn_after_s`; None is the flow.
    """

    status: FlowStatus
    takes_s: float
    spans: tuple[Span, ...]
    critical_path: tuple[str, ...]
    slots: int
    late: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class _Child:
    node: str
    index: int | None = None


@dataclass
class _Run:
    plan: Plan
    assumptions: Mapping[str, Assumption]
    clock_s: float = 0.0
    ended_s: float = 0.0
    slots: int = 0
    late: list[str | None] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flow, nodes = initial(self.plan)
        self.nodes = dict(nodes)
        self._live: set[_Child] = set()
        self._tasks = 0
        self._due: list[tuple[float, int, _Child | LimitReached]] = []
        self._count = 0

    def to_the_end(self) -> None:
        """Runs until the flow has ended."""
        messages: list[Message] = [Began()]
        while messages:
            messages = self._decide(messages) or self._next()

    def _decide(self, messages: list[Message]) -> list[Message]:
        now = _START + timedelta(seconds=self.clock_s)
        decision = decide(self.plan, self.flow, messages, now, nodes=self.nodes)
        self._note(decision)
        self.flow = decision.flow
        self.nodes |= decision.nodes
        found = [message for action in decision.actions for message in self._act(action)]
        self.slots = max(self.slots, self._tasks)
        names = decision.visit | decision.later
        if decision.visit_eligible:
            names |= {name for name, node in self.nodes.items() if node.status is NodeStatus.RUNNING}
        return [*found, *map(Visited, sorted(names))]

    def _note(self, decision: Decision) -> None:
        for name, node in decision.nodes.items():
            if node.status is NodeStatus.RUNNING:
                self.started.setdefault(name, self.clock_s)
            elif node.is_final:
                self.ended.setdefault(name, self.clock_s)
                if self.nodes[name].status is NodeStatus.READY:
                    # It started and ended within one decision.
                    self.started.setdefault(name, self.clock_s)

    def _next(self) -> list[Message]:
        """The messages of the next moment that has any."""
        found: list[Message] = []
        while self._due and (not found or self._due[0][0] <= self.clock_s):
            due_s, _, what = heapq.heappop(self._due)
            if isinstance(what, LimitReached):
                if self.flow.status is not FlowStatus.RUNNING:
                    continue
                found.append(what)
            elif what in self._live:
                found.append(self._end(what))
            else:
                continue
            self.clock_s = due_s
        return found

    def _end(self, child: _Child, outcome: Outcome | None = None) -> Message:
        self._live.discard(child)
        self._tasks -= self._is_task(child.node)
        assumed = self.assumptions[child.node]
        if child.index is None:
            return Ended(child.node, 0, outcome or assumed.outcome)
        ends = Outcome.FAILED if child.index in assumed.failing else Outcome.SUCCEEDED
        return ItemEnded(child.node, child.index, 0, outcome or ends)

    def _is_task(self, name: str) -> bool:
        node = self.plan.nodes[name]
        return node.kind in (NodeKind.TASK, NodeKind.MAP) and not node.recoverable_child

    def _act(self, action: Action) -> Iterable[Message]:
        match action:
            case Start(node, generation, kind):
                return self._start(node, generation, kind)
            case OpenItems(node, _, first, count):
                for index in range(first, first + count):
                    self._begin(_Child(node, index))
            case CancelNode(node, _):
                return self._cancel({child for child in self._live if child.node == node})
            case CancelLive():
                return self._cancel(self._live.copy())
            # There are slots for every task, so a worker claims it at once.
            case SetLimit(node, generation, limit, at) if limit is not Limit.START_WITHIN:
                self._add((at - _START).total_seconds(), LimitReached(node, generation, limit))
            case EndFlow():
                self.ended_s = self.clock_s
            case Warn(node, _):
                self.late.append(node)
        return ()

    def _start(self, node: str, generation: int, kind: NodeKind) -> Iterable[Message]:
        assumed = self.assumptions[node]
        if kind in (NodeKind.SWITCH, NodeKind.MAP) and assumed.outcome is not Outcome.SUCCEEDED:
            # Its expressions fail.
            return (Ended(node, generation, assumed.outcome),)
        if kind is NodeKind.SWITCH:
            return (Chosen(node, generation, assumed.case),)
        if kind is NodeKind.MAP:
            return (Listed(node, generation, assumed.items),)
        self._begin(_Child(node))
        return ()

    def _begin(self, child: _Child) -> None:
        self._live.add(child)
        self._tasks += self._is_task(child.node)
        self._add(self.clock_s + self.assumptions[child.node].takes_s, child)

    def _cancel(self, children: set[_Child]) -> list[Message]:
        ordered = sorted(children, key=lambda child: (child.node, child.index or 0))
        return [self._end(child, Outcome.CANCELLED) for child in ordered]

    def _add(self, at_s: float, what: _Child | LimitReached) -> None:
        # The number keeps the order of those that are due at the same moment.
        heapq.heappush(self._due, (at_s, self._count, what))
        self._count += 1


def simulate(plan: Plan, assumptions: Mapping[str, Assumption]) -> Simulation:
    """Runs a flow once, from its start to its end.

    Args:
        plan: the definition.
        assumptions: what is assumed of each node; none may be missing.
    """
    run = _Run(plan, assumptions)
    run.to_the_end()
    spans = [
        Span(name, node.status, run.started.get(name), run.ended.get(name))
        for name, node in run.nodes.items()
    ]
    spans.sort(key=lambda span: (span.started_s is None, span.started_s, span.ended_s or 0.0))
    return Simulation(
        status=run.flow.status,
        takes_s=run.ended_s,
        spans=tuple(spans),
        critical_path=_critical_path(run),
        slots=run.slots,
        late=tuple(run.late),
    )


def _critical_path(run: _Run) -> tuple[str, ...]:
    """From the node that ended last, back along the sources that ended last before each start."""
    path: list[str] = []
    candidates = list(run.started)
    while candidates:
        latest = max(candidates, key=lambda name: (run.ended.get(name, run.ended_s), run.started[name]))
        path.append(latest)
        sources = {edge.source for edge in run.plan.nodes[latest].edges}
        candidates = [
            name
            for name in sources & run.started.keys()
            if run.ended.get(name, run.ended_s) <= run.started[latest]
        ]
    return tuple(reversed(path))
