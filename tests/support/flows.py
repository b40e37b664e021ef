"""An owner of flows in memory, random graphs, and a reference model of what a flow does."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple

from penstock.core.flow.decide import decide, initial, rows
from penstock.core.flow.messages import (
    Began,
    CancelLive,
    CancelNode,
    Chosen,
    Ended,
    EndFlow,
    ItemEnded,
    Listed,
    Message,
    OpenItems,
    Recovered,
    Refuse,
    ReopenItems,
    Resumed,
    SetLimit,
    Start,
    Visited,
    Warn,
)
from penstock.core.flow.plan import Edge, Join, NodeKind, NodePlan, Plan, Policy
from penstock.core.flow.state import (
    FINAL_NODES,
    UNSUCCESSFUL_NODES,
    FlowStatus,
    NodeStatus,
    Outcome,
    StopReason,
)

NOW = datetime(2026, 11, 23, tzinfo=UTC)

ALL, ALL_DONE, ANY, TWO = Join(), Join(failures_count=True), Join(k=1), Join(k=2)
FAILED, SUCCEEDED, CANCELLED = Outcome.FAILED, Outcome.SUCCEEDED, Outcome.CANCELLED


class Item(NamedTuple):
    """The generation in which an item was last opened, and how it ended."""

    generation: int
    outcome: Outcome | None = None


@dataclass
class World:
    """How children end, which case each switch takes, and how long the list of each map is.

    Attributes:
        ends: outcome by (node, generation), or (node, index, generation) for items.
        cases: the case of each switch.
        totals: the items of each map.
        heals: the generation from which everything succeeds.
    """

    ends: dict = field(default_factory=dict)
    cases: dict = field(default_factory=dict)
    totals: dict = field(default_factory=dict)
    heals: int = 10**9

    def outcome(self, *key):
        if key[-1] >= self.heals:
            return Outcome.SUCCEEDED
        return self.ends.get(key[:-1], Outcome.SUCCEEDED)


class Owner:
    """Applies decisions to rows, as the service does, and loads no row that it need not.

    Attributes:
        children: live children, as (node, index or None, generation).
        history: all children ever started.
        inbox: messages that are to be applied in a later transaction.
    """

    def __init__(self, plan, world=None):
        self.plan = plan
        self.world = world or World()
        self.flow, nodes = initial(plan)
        self.nodes = dict(nodes)
        self.items = {}
        self.children = set()
        self.doomed = set()
        self.history = Counter()
        self.inbox: list[Message] = []
        self.applied: list[Message] = []
        self.actions = []
        self.largest_load = 0

    def begin(self):
        self.apply([Began()])
        return self

    def apply(self, messages):
        """One transaction of the owner."""
        waiting = [message for message in messages if not self._has_counted(message)]
        self.applied += waiting
        for message in waiting:
            if isinstance(message, Ended | ItemEnded):
                self.children.discard((message.node, getattr(message, "index", None), message.generation))
            if isinstance(message, ItemEnded):
                item = self.items.get((message.node, message.index))
                if item == Item(message.generation):
                    self.items[message.node, message.index] = item._replace(outcome=message.outcome)
        while waiting:
            batch, waiting = waiting, []
            names = rows(self.plan, batch)
            self.largest_load = max(self.largest_load, len(names))
            before = self.flow
            decision = decide(
                self.plan,
                self.flow,
                batch,
                NOW,
                nodes=MappingProxyType({name: self.nodes[name] for name in names}),
            )
            self.flow = decision.flow
            self.nodes.update(decision.nodes)
            self.actions += decision.actions
            for action in decision.actions:
                waiting += self._act(action)
            waiting += map(Visited, decision.visit)
            if decision.visit_eligible:
                waiting += map(Visited, self._eligible())
            self.inbox += map(Visited, decision.later)
            started = [a for a in decision.actions if isinstance(a, Start | OpenItems | ReopenItems)]
            if started:
                woken = any(isinstance(message, Resumed | Recovered) for message in batch)
                assert before.may_start or woken
                assert not self.flow.paused
                assert self.flow.stop in (None, StopReason.FAILURE)

    def _has_counted(self, message):
        """Whether an earlier transaction has counted this end of an item."""
        return (
            isinstance(message, ItemEnded)
            and (item := self.items.get((message.node, message.index))) is not None
            and item.generation == message.generation
            and item.outcome is not None
        )

    def _eligible(self):
        return [
            name
            for name, node in self.nodes.items()
            if node.status is NodeStatus.READY
            or (node.status is NodeStatus.RUNNING and self.plan.nodes[name].kind is NodeKind.MAP)
        ]

    def _act(self, action):  # noqa: C901 (one case per action)
        match action:
            case Start(node, generation, NodeKind.SWITCH):
                self._born(node, None, generation)
                self.children.discard((node, None, generation))
                if self.world.outcome(node, generation) is Outcome.FAILED:
                    return [Ended(node, generation, Outcome.FAILED, "no such field")]
                return [Chosen(node, generation, self.world.cases[node])]
            case Start(node, generation, NodeKind.MAP):
                return [Listed(node, generation, self.world.totals[node])]
            case Start(node, generation):
                self._born(node, None, generation)
            case OpenItems(node, generation, first, count):
                for index in range(first, first + count):
                    assert (node, index) not in self.items or self.items[node, index].generation < generation
                    self.items[node, index] = Item(generation)
                    self._born(node, index, generation)
            case ReopenItems(node, generation, count):
                ended = [
                    index
                    for (name, index), item in sorted(self.items.items())
                    if name == node
                    and item.generation < generation
                    and item.outcome not in (None, "succeeded")
                ]
                assert len(ended) >= count
                for index in ended[:count]:
                    self.items[node, index] = Item(generation)
                    self._born(node, index, generation)
            case CancelNode(node, _):
                self.doomed |= {child for child in self.children if child[0] == node}
            case CancelLive():
                self.doomed |= self.children
            case EndFlow():
                assert not self.children, "final while children are live"
            case SetLimit() | Refuse() | Warn():
                pass
            case _:
                raise AssertionError(action)
        return []

    def _born(self, *child):
        self.history[child] += 1
        assert self.history[child] == 1, f"{child} exists twice"
        self.children.add(child)

    def ending(self, child, *, cancelled=False):
        """The message of a child's end; the child is gone."""
        self.children.discard(child)
        node, index, generation = child
        if index is None:
            outcome = Outcome.CANCELLED if cancelled else self.world.outcome(node, generation)
            return Ended(node, generation, outcome)
        outcome = Outcome.CANCELLED if cancelled else self.world.outcome(node, index, generation)
        return ItemEnded(node, index, generation, outcome)

    def end(self, node, index=None, outcome=None):
        """Ends the one live child of a node, or of an item, in a transaction of its own."""
        [child] = [c for c in self.children if c[:2] == (node, index)]
        message = self.ending(child)
        self.apply([replace(message, outcome=outcome) if outcome else message])
        return self

    def run(self, rng=None):
        """Ends everything, in random order, until nothing is live; repeats and mixes messages."""
        rng = rng or random.Random(0)
        while self.inbox or self.children:
            self.step(rng)
        return self

    def step(self, rng):
        """One transaction with some endings, some of them for the second time."""
        living = sorted(self.children, key=str)
        for child in rng.sample(living, rng.randint(min(1, len(living)), len(living))):
            doomed = child in self.doomed and rng.random() < 0.8
            self.inbox.append(self.ending(child, cancelled=doomed))
        batch = rng.sample(self.inbox, rng.randint(min(1, len(self.inbox)), len(self.inbox)))
        for message in batch:
            self.inbox.remove(message)
        repeated = [h for h in self.applied if isinstance(h, Ended | ItemEnded | Began | Chosen | Visited)]
        if repeated and rng.random() < 0.5:
            batch += rng.choices(repeated, k=rng.randint(1, 3))
        if batch and rng.random() < 0.3:
            batch.append(rng.choice(batch))
        rng.shuffle(batch)
        self.apply(batch)
        self.check()

    def check(self):
        """The counters are what the rows say, and the flow is not in limbo."""
        statuses = [node.status for node in self.nodes.values()]
        assert self.flow.unfinished == sum(status not in FINAL_NODES for status in statuses)
        assert self.flow.live == statuses.count(NodeStatus.RUNNING)
        assert self.flow.unsuccessful == sum(status in UNSUCCESSFUL_NODES for status in statuses)
        for name, node in self.nodes.items():
            if node.items is not None:
                mine = [item for (of, _), item in self.items.items() if of == name]
                born = [item for item in mine if item.generation <= node.generation]
                assert node.items.live == sum(item.outcome is None for item in born), name
                assert node.items.live <= self.plan.nodes[name].parallel
        if self.flow.status is FlowStatus.RUNNING:
            held = self.flow.paused and self.flow.stop is None and self._eligible()
            assert self.children or self.inbox or held, "limbo"
        else:
            assert not self.children
            assert self.flow.live == 0

    def statuses(self):
        return {name: node.status.value for name, node in self.nodes.items()}


def random_plan(rng, policy=None, kinds=tuple(NodeKind)):
    """A random graph of at most nine nodes."""
    nodes = {}
    for position in range(rng.randint(1, 9)):
        edges = []
        for source in rng.sample(sorted(nodes), rng.randint(0, min(3, len(nodes)))):
            if nodes[source].kind is NodeKind.SWITCH and rng.random() < 0.8:
                edges += [Edge(source, case) for case in rng.sample("xyz", rng.randint(1, 2))]
            else:
                edges.append(Edge(source))
        joins = [Join(), Join(), Join(failures_count=True), Join(k=1), Join(k=rng.randint(1, 3))]
        join = rng.choice(joins)
        if join.k is not None and join.k > len(edges):
            join = Join()
        kind = rng.choice(kinds)
        nodes[f"n{position}"] = NodePlan(
            kind=kind,
            edges=tuple(edges),
            join=join,
            recoverable_child=kind is NodeKind.FLOW,
            parallel=rng.randint(1, 4),
            tolerate=rng.randint(0, 2),
            k=rng.choice([None, None, 1, 2]),
        )
    return Plan(nodes, policy or rng.choice(list(Policy)))


def random_world(rng, plan, failing=0.3):
    world = World()
    for name, node in plan.nodes.items():
        world.cases[name] = rng.choice("xyz")
        world.totals[name] = rng.choice([0, 1, 2, 3, 5, 8])
        if rng.random() < failing and node.kind is not NodeKind.MAP:
            world.ends[name,] = Outcome.FAILED
        for index in range(world.totals[name]):
            if rng.random() < failing:
                world.ends[name, index] = rng.choice([Outcome.FAILED, Outcome.CANCELLED])
    return world


def reference(plan, world, generation=0):  # noqa: C901 (a model is easier to trust in one piece)
    """The final state of each node of an undisturbed flow with the policy `continue`.

    It evaluates the graph from its leaves, by recursion, and knows neither order nor counters.
    """
    known = {}

    def ends(name):
        if name not in known:
            known[name] = once(name)
        return known[name]

    def once(name):
        node = plan.nodes[name]
        good = bad = 0
        for edge in node.edges:
            before = ends(edge.source)
            if before in ("failed", "cancelled", "blocked"):
                bad += 1
            elif before == "succeeded" and edge.case in (None, world.cases.get(edge.source)):
                good += 1
        if node.edges:
            if node.join.failures_count:
                runs = good + bad > 0
            elif node.join.k is None:
                runs = good > 0 and bad == 0
            else:
                runs = good >= node.join.k
            if not runs:
                return "blocked" if bad else "skipped"
        return of_map(name, node) if node.kind is NodeKind.MAP else str(world.outcome(name, generation))

    def of_map(name, node):
        total = world.totals[name]
        good = sum(world.outcome(name, index, generation) == "succeeded" for index in range(total))
        if node.k is not None:
            return "succeeded" if good >= node.k else "failed"
        return "succeeded" if total - good <= node.tolerate else "failed"

    return {name: ends(name) for name in plan.nodes}


def task(*after, **fields):
    edges = tuple(Edge(*name.split(".")) for name in after)
    return NodePlan(NodeKind.TASK, edges, **fields)


def switch(*after):
    return replace(task(*after), kind=NodeKind.SWITCH)


def fan_out(**fields):
    return NodePlan(NodeKind.MAP, **fields)


def flow(policy=Policy.CONTINUE, **nodes):
    return Plan(nodes, policy)


def begun(plan, **world):
    return Owner(plan, World(**world)).begin()


def started(owner):
    return [child[0] for child in owner.history]
