"""The graph of a definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.flows.graph import MAX_CYCLES, Graph

NAMES = [f"n{number}" for number in range(8)]


@st.composite
def graphs(draw):
    """Nodes with any edges, in any order, also with cycles."""
    order = draw(st.permutations(NAMES))
    return {
        name: {"kind": "timer", "after": draw(st.lists(st.sampled_from(NAMES), unique=True))}
        for name in order
    }


def reached(nodes, name):
    found, waiting = set(), [*nodes[name]["after"]]
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting += nodes[source]["after"]
    return found


@given(graphs())
def test_ancestors_are_what_edges_reach(nodes):
    """F1: expressions may read the nodes that have ended before, and no others."""
    graph = Graph(nodes)
    assert {name: graph.ancestors(name) for name in nodes} == {name: reached(nodes, name) for name in nodes}


def test_a_cycle_through_several_cases_is_one_fault():
    """F1: each fault is named once."""
    nodes = {
        "choose": {"kind": "switch", "cases": [{"case": "a"}], "else": "b", "after": ["load"]},
        "load": {"kind": "timer", "after": ["choose.a", "choose.b"]},
    }
    assert [fault.code for fault in Graph(nodes).faults()] == ["cycle"]


def test_of_many_cycles_the_first_ones_are_reported():
    """F1: a hundred nodes that depend on each other have thousands of cycles. A node behind them is
    still named."""
    names = [f"n{number}" for number in range(100)]
    nodes = {name: {"kind": "timer", "after": names} for name in names}
    nodes["last"] = {"kind": "timer", "after": ["n99"]}
    found = list(Graph(nodes).faults())
    assert [fault.code for fault in found] == ["cycle"] * MAX_CYCLES + ["unreachable"]
    assert found[-1].pointer == "/nodes/last"


@pytest.mark.parametrize("order", [1, -1])
def test_each_edge_of_a_dense_graph_is_read_once(order):
    """F1: 1,000 nodes may have 500,000 edges. Their validation took half a minute."""
    names = [f"n{number}" for number in range(100)]
    after = {name: names[:number] for number, name in enumerate(names)}
    graph = Graph({name: {"kind": "timer", "after": after[name]} for name in names[::order]})
    reads = 0

    class Edges(list):
        def __iter__(self):
            nonlocal reads
            reads += 1
            return super().__iter__()

    graph.edges = {name: Edges(edges) for name, edges in graph.edges.items()}
    assert all(graph.ancestors(name) == set(after[name]) for name in names)
    assert reads == len(names)
