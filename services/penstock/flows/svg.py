"""A definition as an SVG picture: nodes in layers from left to right, with their states if given.

The picture needs no other file. Its colours follow the reader's light or dark mode, each state is
also a word, and a title and a description name everything for screen readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from penstock.flows.drawing import levels, runs, starts
from penstock.flows.graph import Graph

_WIDTH, _HEIGHT = 190, 48
_GAP_X, _GAP_Y = 70, 22
_MARGIN = 20
_HEAD = 34
# Characters of a line in a node.
_LONGEST = 26

_STYLE = """
svg { font: 13px system-ui, sans-serif; --ink: #1b1f24; --dim: #57606a; --line: #8c959f; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --dim: #9198a1; --line: #6e7681; --paper: #0d1117; }
}
.paper { fill: var(--paper); } text { fill: var(--ink); } .dim { fill: var(--dim); font-size: 11px; }
.edge { fill: none; stroke: var(--line); stroke-width: 1.5; } .tip { fill: var(--line); }
rect.node { fill: var(--paper); stroke: var(--line); stroke-width: 1.5; }
.running rect, .ready rect { stroke: #0969da; stroke-width: 3; } .succeeded rect { stroke: #1a7f37; stroke-width: 3; }
.failed rect, .blocked rect { stroke: #cf222e; stroke-width: 3; } .cancelled rect { stroke: #9a6700; stroke-width: 3; }
.skipped, .pending { opacity: .6; } .skipped rect, .pending rect { stroke-dasharray: 5 4; }
"""


def svg(definition: Mapping[str, Any], states: Mapping[str, str] | None = None) -> str:
    """Draws a definition.

    Args:
        definition: a valid one.
        states: for each node of a flow its state, perhaps with more words behind it; None draws
            the definition alone.
    """
    graph = Graph(definition["nodes"])
    layers = _layers(graph)
    places = _coordinates(layers)
    tallest = max(len(layer) for layer in layers)
    width = 2 * _MARGIN + len(layers) * (_WIDTH + _GAP_X) - _GAP_X
    height = _HEAD + 2 * _MARGIN + tallest * (_HEIGHT + _GAP_Y) - _GAP_Y
    title = escape(f"{definition['flow']}, version {definition['version']}")
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">',
        f'<title id="title">Flow {title}</title>',
        f'<desc id="description">{escape(_description(definition, graph, states))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN + 8}" font-weight="600">{title}</text>',
        *_edges(graph, places),
        *(_node(name, definition["nodes"][name], places[name], states) for name in graph.nodes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _layers(graph: Graph) -> list[list[str]]:
    """The nodes by level; within a layer, those with sources far up come first."""
    by_level: dict[int, list[str]] = {}
    for name, level in levels(graph).items():
        by_level.setdefault(level, []).append(name)
    layers: list[list[str]] = []
    rows: dict[str, float] = {}
    for level in sorted(by_level):
        layer = sorted(by_level[level], key=lambda name: _middle(graph, rows, name))
        rows |= {name: float(row) for row, name in enumerate(layer)}
        layers.append(layer)
    return layers


def _middle(graph: Graph, rows: Mapping[str, float], name: str) -> float:
    """The mean row of a node's sources, so that few edges cross."""
    sources = [rows[edge.source] for edge in graph.edges[name]]
    return sum(sources) / len(sources) if sources else 0.0


def _coordinates(layers: Sequence[Sequence[str]]) -> dict[str, tuple[float, float]]:
    """The upper left corner of each node; shorter layers are centred."""
    tallest = max(len(layer) for layer in layers)
    places: dict[str, tuple[float, float]] = {}
    for column, layer in enumerate(layers):
        top = _HEAD + _MARGIN + (tallest - len(layer)) * (_HEIGHT + _GAP_Y) / 2
        for row, name in enumerate(layer):
            places[name] = (_MARGIN + column * (_WIDTH + _GAP_X), top + row * (_HEIGHT + _GAP_Y))
    return places


def _edges(graph: Graph, places: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    for name in graph.nodes:
        x2, y2 = places[name][0], places[name][1] + _HEIGHT / 2
        for edge in graph.edges[name]:
            x1, y1 = places[edge.source][0] + _WIDTH, places[edge.source][1] + _HEIGHT / 2
            bend = _GAP_X / 2
            yield (
                f'<path class="edge" d="M{x1:g} {y1:g} C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2 - 6:g} {y2:g}"/>'
            )
            yield f'<path class="tip" d="M{x2:g} {y2:g} l-8 -4 v8 z"/>'
            if edge.case is not None:
                x, y = x1 + 6, y1 - 6
                yield f'<text class="dim" x="{x:g}" y="{y:g}">{escape(edge.case)}</text>'


def _node(
    name: str, node: Mapping[str, Any], place: tuple[float, float], states: Mapping[str, str] | None
) -> str:
    x, y = place
    state = None if states is None else states.get(name, "pending")
    # Only the first word is a state; the others are for people.
    classes = f"part {state.split()[0].rstrip(',')}" if state else "part"
    below = state or runs(node)
    hint = f"{name}: {runs(node)}, {starts(node)}" + (f", {state}" if state else "")
    return (
        f'<g class="{escape(classes)}"><title>{escape(hint)}</title>'
        f'<rect class="node" x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>'
        f'<text x="{x + 12:g}" y="{y + 20:g}">{escape(_cut(name))}</text>'
        f'<text class="dim" x="{x + 12:g}" y="{y + 37:g}">{escape(_cut(below))}</text></g>'
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _description(definition: Mapping[str, Any], graph: Graph, states: Mapping[str, str] | None) -> str:
    parts = []
    for name in levels(graph):
        node = definition["nodes"][name]
        state = f", {states.get(name, 'pending')}" if states is not None else ""
        parts.append(f"{name} ({runs(node)}) {starts(node)}{state}.")
    return " ".join(parts)
