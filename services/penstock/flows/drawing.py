"""A definition as text: its nodes in an order in which they can run, with what starts each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.flow.plan import DEFAULT_PARALLEL
from penstock.flows.graph import Graph


def levels(graph: Graph) -> dict[str, int]:
    """The length of the longest path to each node, from 1; nodes in an order of running.

    The graph has no cycle.
    """
    found: dict[str, int] = {}
    names = sorted(graph.nodes, key=lambda name: len(graph.ancestors(name)))
    # A node has more ancestors than each of its ancestors.
    for name in names:
        found[name] = 1 + max((found[edge.source] for edge in graph.edges[name]), default=0)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def lines(definition: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Level, name, what runs, and what starts it, for each node of a valid definition."""
    graph = Graph(definition["nodes"])
    return [
        (str(level), name, runs(definition["nodes"][name]), starts(definition["nodes"][name]))
        for name, level in levels(graph).items()
    ]


def runs(node: Mapping[str, Any]) -> str:
    """The work of a node, in a few words."""
    match node["kind"]:
        case "task":
            return f"task {node['type']}"
        case "flow":
            return f"flow {node['flow']}" + (f" version {node['version']}" if "version" in node else "")
        case "switch":
            return "switch: " + ", ".join([*(case["case"] for case in node["cases"]), f"else {node['else']}"])
        case "wait":
            return f"wait for {node['event']}" if "event" in node else f"wait for a run of {node['flow']}"
        case "timer":
            return f"timer: {node['delay_s']:g} s" if "delay_s" in node else f"timer until {node['until']}"
    bounds = [f"{node.get('parallel', DEFAULT_PARALLEL):,} at a time"]
    if "k" in node:
        bounds.append(f"{node['k']:,} suffice")
    elif node.get("tolerate"):
        bounds.append(f"{node['tolerate']:,} may fail")
    return f"{runs(node['each'])} for each item, {', '.join(bounds)}"


def starts(node: Mapping[str, Any]) -> str:
    """The start of a node, in a few words."""
    after = node.get("after", [])
    if not after:
        return "at once"
    names = ", ".join(after)
    join = node.get("join", "all")
    if join == "all_done":
        return f"after the end of {names}"
    if len(after) == 1:
        return f"after {names}"
    if isinstance(join, Mapping):
        return f"after {join['k']} of {names}"
    return f"after {'any' if join == 'any' else 'all'} of {names}"
