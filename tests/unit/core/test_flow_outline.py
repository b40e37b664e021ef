"""The outline of a definition: what a start needs of it, also of invalid ones."""

import pytest

from penstock.core.flow.outline import Outline, is_same, references, task_types

DEFINITION = {
    "flow": "nightly",
    "version": 2.0,
    "inputs": {"day": {}, "size": {"default": 5}, "note": {"default": None}},
    "nodes": {
        "load": {"kind": "task", "type": "load"},
        "clean": {"kind": "flow", "flow": "clean"},
        "each": {"kind": "map", "items": "[]", "each": {"kind": "flow", "flow": "one", "version": 3.0}},
        "again": {"kind": "flow", "flow": "clean"},
        "each_task": {"kind": "map", "items": "[]", "each": {"kind": "task", "type": "mail"}},
    },
}


def test_a_start_gets_its_inputs():
    """F4: defaults fill what is missing; unknown and missing inputs are faults with their place."""
    outline = Outline.of(DEFINITION)
    assert (outline.name, outline.version, outline.nodes) == ("nightly", 2, 5)
    assert outline.children == (("clean", None), ("one", 3))
    assert outline.with_defaults({"day": 1, "size": None}) == {"day": 1, "size": None, "note": None}
    assert list(outline.input_faults({"day": 1}, "/inputs")) == []
    found = [(fault.pointer, fault.reason) for fault in outline.input_faults({"a/b~": 1}, "/inputs")]
    assert [pointer for pointer, _ in found] == ["/inputs/a~1b~0", "/inputs"]
    assert "its inputs are day, note, size" in found[0][1]
    assert "needs the input 'day'" in found[1][1]


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"nodes": []},
        {"nodes": {"a": None, "b": [], "c": {"kind": "flow"}, "d": {"kind": "flow", "flow": 5}}},
        {"nodes": {"a": {"kind": "flow", "flow": "f", "version": 2**31}, "b": {"kind": "map", "each": 5}}},
        {"nodes": {"a": {"kind": "flow", "flow": "f", "version": "1"}, "b": {"kind": "task", "type": 7}}},
    ],
)
def test_parts_with_a_wrong_shape_name_nothing(document):
    """F1: a definition is searched for names before it is known to be valid."""
    assert references(document) == ()
    assert task_types(document) == frozenset()


def test_contents_are_compared_as_json():
    """F1: the order of nodes is content, that of other fields is none; true is not 1."""
    assert task_types(DEFINITION) == {"load", "mail"}
    assert is_same(DEFINITION, dict(reversed(DEFINITION.items())))
    assert not is_same(DEFINITION, {**DEFINITION, "nodes": dict(reversed(DEFINITION["nodes"].items()))})
    one, true = ({**DEFINITION, "inputs": {"a": {"default": value}}} for value in (1, True))
    assert not is_same(one, true)
    assert not is_same(DEFINITION, {**DEFINITION, "description": ""})
