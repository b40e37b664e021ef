"""The graph of a definition: its edges, cycles, ancestors, and nodes that can never start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.core.flow.plan import Edge, parse_edge
from penstock.flows.faults import Fault, pointer


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
        self._ancestors: dict[str, frozenset[str]] | None = None

    def faults(self) -> Iterator[Fault]:
        """Every fault of the edges."""
        for name in self.nodes:
            yield from self._edge_faults(name)
            yield from self._join_faults(name)
        # Several cases of a switch may lead to the same node: that is one cycle.
        cycles = list(dict.fromkeys(map(tuple, self._cycles())))
        yield from (_cycle_fault(self, cycle) for cycle in cycles)
        yield from self._behind({name for cycle in cycles for name in cycle})

    def ancestors(self, name: str) -> frozenset[str]:
        """The nodes that a node depends on, directly or not."""
        if self._ancestors is None:
            self._ancestors = self._all_ancestors()
        return self._ancestors[name]

    def _all_ancestors(self) -> dict[str, frozenset[str]]:
        """The ancestors of all nodes, as bits: a graph of 1,000 nodes may have 500,000 edges."""
        sources = {name: {edge.source for edge in edges} for name, edges in self.edges.items()}
        names = _sources_first(sources)
        bit = {name: 1 << number for number, name in enumerate(names)}
        found = dict.fromkeys(names, 0)
        before: dict[str, int] | None = None
        # One pass finds all, unless there are cycles.
        while found != before:
            before = found.copy()
            for name in names:
                for source in sources[name]:
                    found[name] |= bit[source] | found[source]
        return {
            name: frozenset(other for other in names if bits & bit[other]) for name, bits in found.items()
        }

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
        """One cycle of each group of nodes that depend on each other."""
        done: set[str] = set()
        for root in self.nodes:
            path: list[str] = []
            on_path: dict[str, int] = {}
            # An explicit stack: a chain of a thousand nodes is deeper than Python's own.
            stack: list[tuple[str, Iterator[Edge]]] = []

            def enter(name: str) -> None:
                on_path[name] = len(path)  # noqa: B023 (called in this iteration only)
                path.append(name)  # noqa: B023 (as above)
                stack.append((name, iter(self.edges[name])))  # noqa: B023 (as above)

            if root not in done:
                enter(root)
            while stack:
                name, edges = stack[-1]
                edge = next(edges, None)
                if edge is None:
                    stack.pop()
                    path.pop()
                    del on_path[name]
                    done.add(name)
                elif edge.source in on_path:
                    yield path[on_path[edge.source] :]
                elif edge.source not in done:
                    enter(edge.source)

    def _behind(self, cyclic: set[str]) -> Iterator[Fault]:
        for name in self.nodes:
            blocking = sorted(self.ancestors(name) & cyclic)
            if name not in cyclic and name not in self.ancestors(name) and blocking:
                reason = f"it depends on {blocking[0]!r}, which is part of a cycle: resolve the cycle"
                yield Fault("unreachable", pointer("nodes", name), reason)


def _cycle_fault(graph: Graph, cycle: Sequence[str]) -> Fault:
    # The path follows dependencies; people read it in the order in which nodes would run.
    first = cycle[0]
    ordered = [first, *reversed(cycle[1:]), first]
    position = graph.position(first, cycle[1 % len(cycle)])
    reason = f"a cycle: {' → '.join(ordered)}: remove one of these dependencies"
    return Fault("cycle", pointer("nodes", first, "after", position), reason)


def _sources_first(sources: Mapping[str, Iterable[str]]) -> list[str]:
    """All nodes, each behind those that it depends on, except in a cycle."""
    order: dict[str, None] = {}
    entered: set[str] = set()
    for root in sources:
        # An explicit stack: a chain of a thousand nodes is deeper than Python's own.
        stack = [(root, iter(sources[root]))]
        while stack:
            name, left = stack[-1]
            entered.add(name)
            below = next((source for source in left if source not in entered), None)
            if below is None:
                stack.pop()
                order[name] = None
            else:
                stack.append((below, iter(sources[below])))
    return list(order)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    # Deferred by design of difflib: it is slow to import, and needed for faults only.
    from difflib import get_close_matches  # noqa: PLC0415

    near = get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ": write the name of a node of this definition"
