"""Faults of flow definitions: each with a place, a stable code, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Each code with its meaning; docs/reference/flow-definitions.md lists them.
CODES = {
    "text": "The file is not UTF-8, not YAML or not JSON.",
    "duplicate_name": "A name stands twice in one object; the second would replace the first.",
    "schema": "A field is missing, unknown, or has a wrong value.",
    "unknown_node": "`after`, or an expression, names a node that does not exist.",
    "unknown_case": "`after` names a case that the switch does not have.",
    "not_a_switch": "`after` names a case of a node that is no switch.",
    "duplicate_case": "Two cases of a switch have the same name.",
    "awaited_flow": "A wait names the flow itself, or a flow of another namespace.",
    "foreign_event": "A wait names an event of another namespace.",
    "cycle": "Nodes depend on each other in a circle.",
    "unreachable": "A node can never start.",
    "expression": "An expression has a wrong syntax, names something unknown, or is too large.",
    "expression_type": "The value of an expression cannot be used where it stands.",
    "not_an_ancestor": "An expression reads a node that need not have ended before.",
    "whole_nodes": "An expression reads `nodes` without the name of a node.",
    "unknown_field": "An expression reads a field that nodes, or flows, do not have.",
    "unknown_input": "An expression reads an input that the definition does not declare.",
    "k_and_tolerate": "A map has both `k` and `tolerate`.",
    "unknown_type": "A task has a type that is not registered.",
    "unknown_flow": "A child flow has a definition, or a version, that does not exist.",
    "unknown_argument": "A child flow gets an input that its definition does not declare.",
    "missing_argument": "A child flow does not get an input that its definition requires.",
    "recursion": "A definition contains itself.",
    "depth": "Child flows are nested too deep.",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a definition.

    Attributes:
        code: its kind, one of `CODES`.
        pointer: JSON Pointer (RFC 6901) to the wrong value; "" is the whole definition.
        message: what is wrong, and what to do.
        line, column: the place of the value in the file, from 1; 0 when it is not known.
        expression_at: line and column in the expression, from 1, for faults of expressions.
    """

    code: str
    pointer: str
    message: str
    line: int = 0
    column: int = 0
    expression_at: tuple[int, int] | None = None

    def to_wire(self) -> dict[str, Any]:
        """The fault as JSON."""
        document: dict[str, Any] = {"code": self.code, "pointer": self.pointer, "detail": self.message}
        if self.line:
            document |= {"line": self.line, "column": self.column}
        if self.expression_at:
            line, column = self.expression_at
            document["expression_at"] = {"line": line, "column": column}
        return document


def pointer(*parts: str | int) -> str:
    """The JSON Pointer of a path."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)
