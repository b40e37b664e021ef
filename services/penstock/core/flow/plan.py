"""The plan of a flow definition: its nodes, their edges, joins and limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

# Items of a map that are live at once, unless its node names another number.
DEFAULT_PARALLEL = 100


class NodeKind(StrEnum):
    """The kind of a node. The words are those of the definition."""

    TASK = "task"
    FLOW = "flow"
    SWITCH = "switch"
    WAIT = "wait"
    TIMER = "timer"
    MAP = "map"


class Policy(StrEnum):
    """The effect of a failed node on the rest of its flow.

    `STOP` starts nothing more, and what runs goes on to its end. `CONTINUE` goes on with each
    branch that does not depend on the failed node.
    """

    STOP = "stop"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class Edge:
    """A dependency on the end of another node.

    Attributes:
        source: the node that must end first.
        case: the case of the switch `source` that leads here; None is any end.
    """

    source: str
    case: str | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """When a node with several edges starts.

    Attributes:
        k: successful edges that suffice; None requires every live edge.
        failures_count: whether an edge whose source failed counts as one that succeeded.
    """

    k: int | None = None
    failures_count: bool = False

    @property
    def needs_all(self) -> bool:
        """Whether one failed edge decides the join."""
        return self.k is None and not self.failures_count

    @classmethod
    def from_wire(cls, join: str | Mapping[str, int]) -> Join:
        """The join of a definition: `all`, `all_done`, `any` or `{"k": n}`."""
        if isinstance(join, str):
            return {"all": cls(), "all_done": cls(failures_count=True), "any": cls(k=1)}[join]
        return cls(k=int(join["k"]))


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of a definition.

    Attributes:
        kind: its kind.
        edges: its dependencies; none is a root of the graph.
        join: when it starts.
        recoverable_child: whether its child is a flow, which a recovery continues in place.
        parallel: items of a map that are live at once.
        tolerate: items of a map that may fail.
        k: items of a map that suffice; the others are cancelled. None requires all but `tolerate`.
        start_within_s: seconds from the node's start to the claim of its task.
        finish_within_s: seconds from the node's start to its end.
        warn_after_s: seconds from the node's start after which a running node is reported.
    """

    kind: NodeKind
    edges: tuple[Edge, ...] = ()
    join: Join = field(default_factory=Join)
    recoverable_child: bool = False
    parallel: int = DEFAULT_PARALLEL
    tolerate: int = 0
    k: int | None = None
    start_within_s: float | None = None
    finish_within_s: float | None = None
    warn_after_s: float | None = None

    @property
    def has_limits(self) -> bool:
        """Whether a start sets a limit."""
        limits = (self.start_within_s, self.finish_within_s, self.warn_after_s)
        return limits != (None, None, None)


@dataclass(frozen=True)
class Plan:
    """A definition as `decide` reads it.

    Attributes:
        nodes: the nodes by name.
        on_failure: what the failure of a node means for the others.
        timeout_s: seconds from the flow's start, or recovery, to its end.
        warn_after_s: seconds from the flow's start after which an unfinished flow is reported.
    """

    nodes: Mapping[str, NodePlan]
    on_failure: Policy = Policy.STOP
    timeout_s: float | None = None
    warn_after_s: float | None = None

    @classmethod
    def from_wire(cls, definition: Mapping[str, Any]) -> Plan:
        """The plan of a valid definition (`schemas/flows/definition.schema.json`)."""
        return cls(
            nodes={name: _node(node) for name, node in definition["nodes"].items()},
            on_failure=Policy(definition.get("on_failure", Policy.STOP)),
            timeout_s=definition.get("timeout_s"),
            warn_after_s=definition.get("warn_after_s"),
        )

    @cached_property
    def successors(self) -> Mapping[str, Sequence[str]]:
        """The nodes with an edge from a node, each once, in the order of the definition."""
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for name, node in self.nodes.items():
            for source in dict.fromkeys(edge.source for edge in node.edges):
                found[source].append(name)
        return found

    @cached_property
    def has_limits(self) -> bool:
        """Whether the flow or one of its nodes has a limit."""
        limits = (self.timeout_s, self.warn_after_s)
        return limits != (None, None) or any(node.has_limits for node in self.nodes.values())

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each node in the definition, from 0."""
        return {name: position for position, name in enumerate(self.nodes)}

    @cached_property
    def roots(self) -> Sequence[str]:
        """The nodes without an edge."""
        return [name for name, node in self.nodes.items() if not node.edges]

    def descendants(self, names: frozenset[str]) -> frozenset[str]:
        """The nodes that depend on one of `names`, directly or not."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            for successor in self.successors[waiting.pop()]:
                if successor not in found:
                    found.add(successor)
                    waiting.append(successor)
        return frozenset(found)

    def edges_from(self, source: str, name: str) -> Iterator[tuple[int, Edge]]:
        """The edges of node `name` that begin at `source`, with their positions."""
        return (
            (position, edge) for position, edge in enumerate(self.nodes[name].edges) if edge.source == source
        )


def parse_edge(text: str) -> Edge:
    """The edge of an entry of `after`: `NODE`, or `SWITCH.CASE`."""
    source, dot, case = text.partition(".")
    return Edge(source, case if dot else None)


def _node(node: Mapping[str, Any]) -> NodePlan:
    kind = NodeKind(node["kind"])
    child = node["each"] if kind is NodeKind.MAP else node
    return NodePlan(
        kind=kind,
        edges=tuple(dict.fromkeys(parse_edge(text) for text in node.get("after", ()))),
        join=Join.from_wire(node.get("join", "all")),
        recoverable_child=child["kind"] == NodeKind.FLOW,
        # JSON Schema takes 2.0 for an integer.
        parallel=int(node.get("parallel", DEFAULT_PARALLEL)),
        tolerate=int(node.get("tolerate", 0)),
        k=int(node["k"]) if "k" in node else None,
        start_within_s=node.get("start_within_s"),
        finish_within_s=node.get("finish_within_s"),
        warn_after_s=node.get("warn_after_s"),
    )
