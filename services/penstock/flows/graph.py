"""The graph of a definition: its edges, cycles, ancestors, and nodes that can never start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from penstock.core.flow.plan import Edge, parse_edge
from penstock.flows.faults import Fault, pointer

# A definition may have a hundred thousand cycles. The first ones show what to change.
MAX_CYCLES = 100


class Graph:
    """The nodes and edges of a definition whose shape is valid.

    Attributes:
        nodes: the nodes by name.
        edges: the edges of each node that begin at a node which exists.
    """

    def __init__(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        self.nodes = nodes
        self._all = {
            name: [parse_edge(text) for text in node.get("after", ())] for name, node in nodes.items()
        }
        self.edges = {
            name: [edge for edge in edges if edge.source in nodes] for name, edges in self._all.items()
        }
        self._ancestors: dict[str, frozenset[str]] = {}
        # All ancestors of a node as bits, by the number of the node.
        self._complete: dict[int, int] = {}

    def faults(self) -> Iterator[Fault]:
        """Every fault of the edges, but at most `MAX_CYCLES` cycles."""
        for name in self.nodes:
            yield from self._edge_faults(name)
            yield from self._join_faults(name)
        yield from (_cycle_fault(self, cycle) for cycle in islice(self._cycles(), MAX_CYCLES))
        yield from self._behind()

    def ancestors(self, name: str) -> frozenset[str]:
        """The nodes that a node depends on, directly or not."""
        if name not in self._ancestors:
            bits = self._ancestor_bits(self._numbers[name])
            self._ancestors[name] = frozenset(
                other for other, number in self._numbers.items() if bits >> number & 1
            )
        return self._ancestors[name]

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.nodes)}

    @cached_property
    def _sources(self) -> Sequence[int]:
        """The direct sources of each node, as bits: 1,000 nodes may have 500,000 edges."""
        sources = []
        for edges in self.edges.values():
            bits = 0
            for edge in edges:
                bits |= 1 << self._numbers[edge.source]
            sources.append(bits)
        return sources

    def _ancestor_bits(self, number: int) -> int:
        found, left = 0, self._sources[number]
        while left:
            # The last one first: in most files its ancestors are complete, and include the others.
            source = left.bit_length() - 1
            found |= 1 << source | self._complete.get(source, 0)
            if source not in self._complete:
                left |= self._sources[source]
            left &= ~found
        self._complete[number] = found
        return found

    def position(self, name: str, source: str) -> int:
        """The position in `after` of the first edge from `source`."""
        return [edge.source for edge in self._all[name]].index(source)

    def _edge_faults(self, name: str) -> Iterator[Fault]:
        for position, edge in enumerate(self._all[name]):
            if edge.source in self.nodes and edge.case is None:
                continue
            at = pointer("nodes", name, "after", position)
            if edge.source in self.nodes:
                yield from self._case_faults(at, edge)
            else:
                reason = f"there is no node {edge.source!r}{_nearest(edge.source, self.nodes)}"
                yield Fault("unknown_node", at, reason)

    def _case_faults(self, at: str, edge: Edge) -> Iterator[Fault]:
        source = self.nodes[edge.source]
        if source["kind"] != "switch":
            reason = (
                f"node {edge.source!r} is a {source['kind']} and has no cases: write {edge.source!r} alone"
            )
            yield Fault("not_a_switch", at, reason)
            return
        cases = [*(case["case"] for case in source["cases"]), source["else"]]
        if edge.case not in cases:
            yield Fault("unknown_case", at, f"switch {edge.source!r} has the cases {', '.join(cases)}")

    def _join_faults(self, name: str) -> Iterator[Fault]:
        join = self.nodes[name].get("join", "all")
        if not isinstance(join, Mapping):
            return
        # One case of a switch is taken, so its cases count once.
        most = len({edge.source for edge in self._all[name]})
        if join["k"] > most:
            reason = f"{join['k']} edges must succeed, and at most {most} can: name more nodes, or lower k"
            yield Fault("unreachable", pointer("nodes", name, "join", "k"), reason)

    def _cycles(self) -> Iterator[list[str]]:
        """One cycle for each edge that closes one."""
        done: set[str] = set()
        for root in self.nodes:
            path: list[str] = []
            on_path: dict[str, int] = {}
            # An explicit stack: a chain of a thousand nodes is deeper than Python's own.
            stack: list[tuple[str, Iterator[str]]] = []

            def enter(name: str) -> None:
                on_path[name] = len(path)  # noqa: B023 (called in this iteration only)
                path.append(name)  # noqa: B023 (as above)
                # Several cases of a switch are edges from one node, and close one cycle.
                sources = dict.fromkeys(edge.source for edge in self.edges[name])
                stack.append((name, iter(sources)))  # noqa: B023 (as above)

            if root not in done:
                enter(root)
            while stack:
                name, sources = stack[-1]
                source = next(sources, None)
                if source is None:
                    stack.pop()
                    path.pop()
                    del on_path[name]
                    done.add(name)
                elif source in on_path:
                    yield path[on_path[source] :]
                elif source not in done:
                    enter(source)

    def _behind(self) -> Iterator[Fault]:
        cyclic = {name for name in self.nodes if name in self.ancestors(name)}
        for name in self.nodes:
            blocking = min(self.ancestors(name) & cyclic, default=None)
            if name not in cyclic and blocking is not None:
                reason = f"it depends on {blocking!r}, which is part of a cycle: resolve the cycle"
                yield Fault("unreachable", pointer("nodes", name), reason)


def _cycle_fault(graph: Graph, cycle: Sequence[str]) -> Fault:
    # The path follows dependencies; people read it in the order in which nodes would run.
    first = cycle[0]
    ordered = [first, *reversed(cycle[1:]), first]
    position = graph.position(first, cycle[1 % len(cycle)])
    reason = f"a cycle: {' → '.join(ordered)}: remove one of these dependencies"
    return Fault("cycle", pointer("nodes", first, "after", position), reason)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    # Deferred by design of difflib: it is slow to import, and needed for faults only.
    from difflib import get_close_matches  # noqa: PLC0415

    near = get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ": write the name of a node of this definition"
