"""The expressions of a definition: where they are, and what they may read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.cel import Path, compile_expression
from penstock.errors import InvalidExpression
from penstock.flows.faults import Fault, pointer
from penstock.flows.graph import Graph

# The fields of a node that an expression can read. `status` and `case` exist once it has ended.
NODE_FIELDS = ("output", "status", "case")
# The fields of its flow that an expression can read.
FLOW_FIELDS = ("id", "name", "version", "generation", "schedule", "tick")

FLOW_VARIABLES = frozenset({"inputs", "nodes", "flow"})
ITEM_VARIABLES = FLOW_VARIABLES | {"item", "index"}

# The types of values by field, as CEL names them. JSON is what contexts can have.
_JSON = ("BOOL", "INT", "UINT", "DOUBLE", "STRING", "LIST", "MAP", "NULL", "TIMESTAMP")
_TYPES = {"when": ("BOOL",), "items": ("LIST",), "key": ("STRING",), "until": ("TIMESTAMP", "STRING")}

# The fields with an expression, by the kind of a node.
_FIELDS = {
    "task": ("key", "input"),
    "flow": ("input",),
    "wait": ("key",),
    "timer": ("until",),
    "map": ("items",),
}


@dataclass(frozen=True, slots=True)
class Place:
    """One expression of a definition.

    Attributes:
        at: JSON Pointer to it.
        text: its source.
        node: the node that evaluates it; None for the output of the flow.
        is_item: whether it is evaluated for each item of a map.
        types: the types that its value may have.
    """

    at: str
    text: str
    node: str | None
    is_item: bool = False
    types: tuple[str, ...] = _JSON


def expressions_of(definition: Mapping[str, Any]) -> Iterator[Place]:
    """The expressions of a definition whose shape is valid."""
    for name, node in definition["nodes"].items():
        at = ("nodes", name)
        for field in _FIELDS.get(node["kind"], ()):
            if field in node:
                yield Place(pointer(*at, field), node[field], name, types=_types(node, field))
        for position, case in enumerate(node.get("cases", ())):
            at_case = pointer(*at, "cases", position, "when")
            yield Place(at_case, case["when"], name, types=_TYPES["when"])
        each = node.get("each", {})
        for field in _FIELDS.get(each.get("kind"), ()):
            if field in each:
                at_each = pointer(*at, "each", field)
                yield Place(at_each, each[field], name, is_item=True, types=_types(each, field))
    if "output" in definition:
        yield Place(pointer("output"), definition["output"], None)


def _types(node: Mapping[str, Any], field: str) -> tuple[str, ...]:
    if field == "input" and node["kind"] == "flow":
        return ("MAP",)
    return _TYPES.get(field, _JSON)


def expression_faults(definition: Mapping[str, Any], graph: Graph) -> Iterator[Fault]:
    """Every fault of the expressions."""
    for place in expressions_of(definition):
        variables = ITEM_VARIABLES if place.is_item else FLOW_VARIABLES
        try:
            expression = compile_expression(place.text, variables)
        except InvalidExpression as error:
            at = (error.line, error.column) if error.line else None
            yield Fault("expression", place.at, _advice(error.reason, place), expression_at=at)
            continue
        if expression.type not in ("DYN", *place.types):
            reason = f"its value is {expression.type}; {' or '.join(place.types)} is needed here"
            yield Fault("expression_type", place.at, reason)
        for path in expression.paths:
            found = _path_fault(definition, graph, place, path)
            if found is not None:
                code, reason = found
                yield Fault(code, place.at, reason, expression_at=expression.position(path.at))


def literal_keys(text: str) -> frozenset[str] | None:
    """The names of an object that an expression writes out; None if it does not, or is faulty."""
    try:
        return compile_expression(text, ITEM_VARIABLES).keys
    except InvalidExpression:
        return None


def _advice(reason: str, place: Place) -> str:
    if "undeclared reference" in reason:
        names = sorted(ITEM_VARIABLES if place.is_item else FLOW_VARIABLES)
        return f"{reason}: expressions read {', '.join(names)}, and have the functions of CEL"
    return reason


def _path_fault(
    definition: Mapping[str, Any], graph: Graph, place: Place, path: Path
) -> tuple[str, str] | None:
    variable, *fields = path.names
    if variable == "inputs" and fields:
        declared = definition.get("inputs", {})
        if fields[0] not in declared:
            return "unknown_input", f"there is no input {fields[0]!r}: declare it in `inputs`"
    elif variable == "flow" and fields and fields[0] not in FLOW_FIELDS:
        return "unknown_field", f"a flow has no field {fields[0]!r}; it has {', '.join(FLOW_FIELDS)}"
    elif variable == "nodes":
        return _node_fault(graph, place, fields)
    return None


def _node_fault(graph: Graph, place: Place, fields: list[str]) -> tuple[str, str] | None:
    if not fields:
        return "whole_nodes", "write the name of the node: nodes.NAME.output"
    name = fields[0]
    if name not in graph.nodes:
        return "unknown_node", f"there is no node {name!r}: write the name of a node of this definition"
    if place.node is not None and name not in graph.ancestors(place.node):
        reason = (
            f"node {name!r} need not have ended before {place.node!r}: add it to `after` of {place.node!r}"
        )
        return "not_an_ancestor", reason if name != place.node else f"node {name!r} cannot read itself"
    if len(fields) > 1 and fields[1] not in NODE_FIELDS:
        has = f"a node has no field {fields[1]!r}; it has {', '.join(NODE_FIELDS)}"
        return "unknown_field", f"{has}: write nodes.{name}.output.{fields[1]}"
    return None
