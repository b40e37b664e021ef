"""SVG pictures of definitions and flows."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from penstock.flows.loading import load
from penstock.flows.svg import svg

EXAMPLE = Path(__file__).parents[3] / "schemas" / "flows" / "definition.example.yaml"
SPACE = "{http://www.w3.org/2000/svg}"


def test_a_picture_has_every_node_and_edge_and_no_two_overlap():
    """O7: layers from left to right; each edge leads to the right; the description names all."""
    definition = load(EXAMPLE.read_bytes()).document
    root = ET.fromstring(svg(definition))
    boxes = [
        tuple(float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        for box in root.iter(f"{SPACE}rect")
        if box.attrib["class"] == "node"
    ]
    assert len(boxes) == len(definition["nodes"])
    for x, y, width, height in boxes:
        overlapping = [
            b for b in boxes if x < b[0] + b[2] and b[0] < x + width and y < b[1] + b[3] and b[1] < y + height
        ]
        assert overlapping == [(x, y, width, height)]
    edges = [path.attrib["d"] for path in root.iter(f"{SPACE}path") if path.attrib["class"] == "edge"]
    assert len(edges) == sum(len(set(node.get("after", ()))) for node in definition["nodes"].values())
    for edge in edges:
        numbers = edge.replace("M", "").replace("C", "").split()
        assert float(numbers[0]) < float(numbers[-2])
    description = root.findtext(f"{SPACE}desc")
    assert description is not None
    assert all(name in description for name in definition["nodes"])


def test_states_are_words_and_colours_and_text_is_escaped():
    """O7: each state is a class for its colour and a word for readers; names inject no markup."""
    definition = {
        "flow": "f",
        "version": 1,
        "nodes": {
            "a": {"kind": "task", "type": "<b>&"},
            "b": {"kind": "task", "type": "t", "after": ["a"]},
        },
    }
    picture = svg(definition, {"a": "running, 3 of 5 items"})
    root = ET.fromstring(picture)
    groups = {group.findtext(f"{SPACE}title"): group.attrib["class"] for group in root.iter(f"{SPACE}g")}
    assert groups == {
        "a: task <b>&, at once, running, 3 of 5 items": "part running",
        "b: task t, after a, pending": "part pending",
    }
    texts = [text.text for text in root.iter(f"{SPACE}text")]
    assert "running, 3 of 5 items" in texts
    assert "<b>" not in picture
