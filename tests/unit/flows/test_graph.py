"""The graph of a definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.flows.graph import Graph

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


def test_a_graph_with_all_edges_is_read_once():
    """F1: 1,000 nodes with 500,000 edges are within the limits, and took half a minute."""
    names = [f"n{number}" for number in range(400)]
    nodes = {name: {"kind": "timer", "after": names[:number]} for number, name in enumerate(names)}
    reads = 0

    class Edges(list):
        def __iter__(self):
            nonlocal reads
            reads += 1
            return super().__iter__()

    graph = Graph(nodes)
    graph.edges = {name: Edges(edges) for name, edges in graph.edges.items()}
    assert len(graph.ancestors(names[-1])) == 399
    assert all(len(graph.ancestors(name)) == number for number, name in enumerate(names))
    assert reads <= 2 * len(names)
