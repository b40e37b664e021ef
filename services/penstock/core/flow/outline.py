"""The parts of a definition that a start needs: its declared inputs, its nodes, its child flows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRecord

# The name of a definition, and its version; None is the newest one.
Reference = tuple[str, int | None]

# The largest version that the schema and PostgreSQL have.
MAX_VERSION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Outline:
    """A definition without what its nodes do.

    Attributes:
        name: of the definition.
        version: of the definition.
        inputs: the declared inputs by name; each may have a `default`.
        nodes: number of its nodes.
        children: the definitions that its child flows run.
    """

    name: str
    version: int
    inputs: Mapping[str, Mapping[str, Any]]
    nodes: int
    children: Sequence[Reference]

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Outline:
        """The outline of a valid definition."""
        return cls(
            definition["flow"],
            int(definition["version"]),
            definition.get("inputs", {}),
            len(definition["nodes"]),
            references(definition),
        )

    def reduced(self) -> dict[str, Any]:
        """The part of the definition that the validation of a parent reads."""
        children = (
            {"kind": "flow", "flow": name} | ({} if version is None else {"version": version})
            for name, version in self.children
        )
        return {"inputs": self.inputs, "nodes": {str(index): child for index, child in enumerate(children)}}

    def input_faults(self, given: Mapping[str, Any], pointer: str) -> Iterator[InvalidRecord]:
        """Faults of the inputs of a start.

        Args:
            given: inputs by name.
            pointer: JSON Pointer to them.
        """
        which = f"flow {self.name!r}, version {self.version},"
        for name in given:
            if name not in self.inputs:
                has = ", ".join(sorted(self.inputs)) or "none"
                part = name.replace("~", "~0").replace("/", "~1")
                reason = f"{which} declares no input {name!r}: its inputs are {has}"
                yield InvalidRecord(reason, pointer=f"{pointer}/{part}")
        for name, declared in self.inputs.items():
            if "default" not in declared and name not in given:
                reason = f"{which} needs the input {name!r}, which has no default: give it a value"
                yield InvalidRecord(reason, pointer=pointer)

    def with_defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, with the default of each one that is not given."""
        defaults = {name: each["default"] for name, each in self.inputs.items() if "default" in each}
        return {**defaults, **given}


def references(definition: Any) -> tuple[Reference, ...]:
    """The definitions that the child flows of a definition name, each once.

    The definition need not be valid: parts with a wrong shape name nothing.
    """
    nodes = definition.get("nodes") if isinstance(definition, dict) else None
    found: dict[Reference, None] = {}
    for node in nodes.values() if isinstance(nodes, dict) else ():
        for child in (node, node.get("each") if isinstance(node, dict) else None):
            if not isinstance(child, dict) or child.get("kind") != "flow":
                continue
            name, version = child.get("flow"), child.get("version")
            if isinstance(name, str) and version is None:
                found[name, None] = None
            # JSON Schema takes 2.0 for an integer.
            elif isinstance(name, str) and isinstance(version, int | float) and 1 <= version <= MAX_VERSION:
                found[name, int(version)] = None
    return tuple(found)


def task_types(definition: Any) -> frozenset[str]:
    """The task types that a definition names, which need not be valid."""
    nodes = definition.get("nodes") if isinstance(definition, dict) else None
    parts = [
        part
        for node in (nodes.values() if isinstance(nodes, dict) else ())
        if isinstance(node, dict)
        for part in (node, node.get("each"))
    ]
    return frozenset(
        part["type"]
        for part in parts
        if isinstance(part, dict) and part.get("kind") == "task" and isinstance(part.get("type"), str)
    )


def is_same(one: Any, other: Any) -> bool:
    """Whether two definitions have the same content. The order of their nodes is a part of it."""
    return _ordered(one) == _ordered(other) and list(one["nodes"]) == list(other["nodes"])


def _ordered(value: Any) -> Any:
    """A value in a form that distinguishes true from 1, and whose fields have one order."""
    if isinstance(value, dict):
        return "object", sorted((name, _ordered(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", [_ordered(each) for each in value]
    return type(value).__name__, value
