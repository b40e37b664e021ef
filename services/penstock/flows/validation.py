"""Validates definitions: all faults at once, each with its place, a stable code and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any

import jsonschema_rs
import orjson

from penstock.contracts.files import schemas_folder
from penstock.contracts.validation import faults as schema_faults
from penstock.core.flow.plan import NodeKind
from penstock.core.flow.tick_wait import problem_of
from penstock.core.flow.waiting import event_problem
from penstock.errors import InvalidRecord
from penstock.flows.expressions import expression_faults, literal_keys
from penstock.flows.faults import Fault, pointer
from penstock.flows.graph import Graph
from penstock.flows.loading import MAX_LEVELS, load

# Child flows in each other. The owner of flows advances them one by one, so this bounds its work.
MAX_DEPTH = 100

_NAME_PATTERN = "^[a-z][a-z0-9_]{0,62}$"
_MISSING = re.compile('"(.+)" is a required property')
_KINDS = frozenset(kind.value for kind in NodeKind)
# The kinds of nodes with a choice of two fields, and the fields.
_EITHER = {"timer": "`delay_s` or `until`", "wait": "`event` or `flow`"}

# Gives the definition with a name and a version, None for the newest; None if there is none.
FindDefinition = Callable[[str, int | None], Mapping[str, Any] | None]


@cache
def _schema() -> jsonschema_rs.Draft202012Validator:
    document = orjson.loads((schemas_folder() / "flows" / "definition.schema.json").read_bytes())
    return jsonschema_rs.Draft202012Validator(document)


@cache
def _node_schema() -> jsonschema_rs.Draft202012Validator:
    document = orjson.loads((schemas_folder() / "flows" / "definition.schema.json").read_bytes())
    return jsonschema_rs.Draft202012Validator({"$ref": "#/$defs/node", "$defs": document["$defs"]})


def validate_text(
    data: bytes,
    *,
    types: AbstractSet[str] | None = None,
    definitions: FindDefinition | None = None,
) -> tuple[Any, list[Fault]]:
    """Reads and validates a file with a definition in YAML or JSON.

    Args:
        data: the file.
        types: the task types that exist; None does not check them.
        definitions: finds other definitions; None checks only that none is the flow itself.

    Returns:
        the definition, and its faults in the order of the file, with lines and columns. The
        definition is None if the file cannot be read.
    """
    loaded = load(data)
    found = list(loaded.faults)
    if loaded.document is not None:
        found += validate(loaded.document, types=types, definitions=definitions)
    placed = [loaded.place(fault) for fault in found]
    return loaded.document, sorted(placed, key=lambda fault: (fault.line, fault.column))


def validate(
    document: Any,
    *,
    types: AbstractSet[str] | None = None,
    definitions: FindDefinition | None = None,
) -> list[Fault]:
    """Validates a definition; arguments and faults as of `validate_text`, without lines.

    A part with a wrong shape is reported, and all other parts are still checked.
    """
    if _is_deep(document):
        return [Fault("schema", "", f"nested deeper than {MAX_LEVELS} levels: flatten the definition")]
    errors = schema_faults(_schema(), document)
    # One value may break several rules with the same words.
    found = list(dict.fromkeys(fault for error in errors for fault in _schema_fault(document, error)))
    sound = _sound(document)
    if sound is not None:
        graph = Graph(sound["nodes"])
        found += graph.faults()
        found += expression_faults(sound, graph)
        found += _node_faults(sound, types)
        found += _child_faults(sound, definitions)
    return found


def _schema_fault(document: Any, error: InvalidRecord) -> Iterator[Fault]:
    """The fault of an error of the schema, in the words of definitions."""
    reason = error.reason
    value = _value_at(document, error.pointer)
    kind = value.get("kind") if isinstance(value, dict) else None
    if "keyword" in reason and "oneOf" in reason:
        if kind not in _EITHER:
            # Another error says that the value is no node at all.
            return
        reason = f"a {kind} has either {_EITHER[kind]}: name one of them"
    elif "does not match" in reason and reason.endswith(f'"{_NAME_PATTERN}"'):
        name = reason.partition(" does not match")[0]
        reason = f"{name} is no name: names begin with a small letter, and have small letters, digits and _"
    elif (missing := _MISSING.fullmatch(reason)) is not None:
        whose = f"a {kind}" if kind in _KINDS else "this object"
        reason = f"{whose} needs the field {missing[1]!r}: add it"
    yield Fault("schema", error.pointer, reason)


def _value_at(document: Any, at: str) -> Any:
    """The value at a JSON Pointer; None if there is none."""
    for part in at.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict):
            document = document.get(name)
        elif isinstance(document, list) and name.isdigit() and int(name) < len(document):
            document = document[int(name)]
        else:
            return None
    return document


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_LEVELS):
        below = (
            part.values() if isinstance(part, dict) else part
            for part in level
            if isinstance(part, dict | list)
        )
        level = [part for parts in below for part in parts]
    return bool(level)


def _sound(document: Any) -> dict[str, Any] | None:
    """The parts of a definition whose shape is valid; None if there are no nodes at all.

    A node with a wrong shape stays as one without expressions, so that references to it hold.
    """
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), dict):
        return None
    nodes = {
        name: node if _node_schema().is_valid(node) else _placeholder(document, name, node)
        for name, node in document["nodes"].items()
    }
    sound: dict[str, Any] = {"nodes": nodes}
    for field, kind in (("inputs", dict), ("flow", str), ("output", str)):
        if isinstance(document.get(field), kind):
            sound[field] = document[field]
    return sound


def _placeholder(document: Mapping[str, Any], name: str, node: Any) -> dict[str, Any]:
    """A valid node in place of one with a wrong shape. It keeps the edges and the read fields."""
    after = node.get("after") if isinstance(node, dict) else None
    edges = [text for text in after if isinstance(text, str)] if isinstance(after, list) else []
    if isinstance(node, dict) and node.get("kind") == "switch":
        cases = [{"case": case, "when": "true"} for case in sorted(_cases(document, name))]
        return {"kind": "switch", "after": edges, "cases": cases, "else": ""}
    return {"kind": "wait", "after": edges, "event": ""}


def _cases(document: Mapping[str, Any], switch: str) -> set[str]:
    """The cases of a switch that other nodes name."""
    named: set[str] = set()
    for node in document["nodes"].values():
        after = node.get("after") if isinstance(node, dict) else None
        for text in after if isinstance(after, list) else ():
            if isinstance(text, str) and text.startswith(f"{switch}."):
                named.add(text.partition(".")[2])
    return named


def _node_faults(definition: Mapping[str, Any], types: AbstractSet[str] | None) -> Iterator[Fault]:
    for name, node in definition["nodes"].items():
        at = ("nodes", name)
        if "k" in node and "tolerate" in node:
            reason = "`k` says already how many items may fail: remove `tolerate`"
            yield Fault("k_and_tolerate", pointer(*at, "tolerate"), reason)
        if node["kind"] == "switch":
            yield from _case_faults(name, node)
        if node["kind"] == "wait" and "flow" in node and "flow" in definition:
            problem = problem_of(definition["flow"], node["flow"])
            if problem is not None:
                yield Fault("awaited_flow", pointer(*at, "flow"), problem)
        if node["kind"] == "wait" and "event" in node and "flow" in definition:
            problem = event_problem(definition["flow"], node["event"])
            if problem is not None:
                yield Fault("foreign_event", pointer(*at, "event"), problem)
        for where, task in ((at, node), ((*at, "each"), node.get("each", {}))):
            known = types is None or task.get("kind") != "task" or task["type"] in types
            if not known:
                reason = f"there is no task type {task['type']!r}: register it, or correct the name"
                yield Fault("unknown_type", pointer(*where, "type"), reason)


def _case_faults(name: str, node: Mapping[str, Any]) -> Iterator[Fault]:
    seen: set[str] = set()
    for position, case in enumerate(node["cases"]):
        if case["case"] in seen:
            reason = f"the case {case['case']!r} stands twice: rename it"
            yield Fault("duplicate_case", pointer("nodes", name, "cases", position, "case"), reason)
        seen.add(case["case"])
    if node["else"] in seen:
        reason = f"`else` is also the case {node['else']!r}: give it a name of its own"
        yield Fault("duplicate_case", pointer("nodes", name, "else"), reason)


def _children(definition: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, node in definition["nodes"].items():
        for where, child in ((("nodes", name), node), (("nodes", name, "each"), node.get("each", {}))):
            if child.get("kind") == "flow":
                yield pointer(*where, "flow"), child


def _child_faults(definition: Mapping[str, Any], find: FindDefinition | None) -> Iterator[Fault]:
    """Faults of child flows; without `find` only that a definition contains itself is known."""
    depths: dict[tuple[str, int | None], int | list[str]] = {}
    own = str(definition.get("flow", ""))
    for at, child in _children(definition):
        name, version = child["flow"], child.get("version")
        found = None if find is None else find(name, version)
        if find is not None and found is None and name != own:
            which = f"version {version} of " if version else ""
            yield Fault("unknown_flow", at, f"there is no {which}flow {name!r}: upload it first")
            continue
        yield from _argument_faults(at, child, found)
        depth = _depth(name, version, find or _nothing, [own], depths)
        if isinstance(depth, list):
            reason = f"the flow contains itself: {' → '.join(depth)}: remove one of these child flows"
            yield Fault("recursion", at, reason)
        elif depth > MAX_DEPTH - 1:
            reason = f"child flows are nested more than {MAX_DEPTH} deep: nest fewer"
            yield Fault("depth", at, reason)


def _nothing(name: str, version: int | None) -> None:
    """No other definition is known."""


def _argument_faults(
    at: str, child: Mapping[str, Any], definition: Mapping[str, Any] | None
) -> Iterator[Fault]:
    """Faults of arguments that are written out; others are found when the flow starts."""
    if definition is None:
        return
    declared = definition.get("inputs", {})
    given = literal_keys(child["input"]) if "input" in child else frozenset()
    if given is None:
        return
    where = f"{at.removesuffix('/flow')}/input" if "input" in child else at
    for name in sorted(given - declared.keys()):
        reason = (
            f"flow {child['flow']!r} has no input {name!r}: it has {', '.join(sorted(declared)) or 'none'}"
        )
        yield Fault("unknown_argument", where, reason)
    for name, argument in declared.items():
        if "default" not in argument and name not in given:
            reason = f"flow {child['flow']!r} needs the input {name!r}: name it in `input`"
            yield Fault("missing_argument", where, reason)


def _depth(
    name: str,
    version: int | None,
    find: FindDefinition,
    above: list[str],
    known: dict[tuple[str, int | None], int | list[str]],
) -> int | list[str]:
    """How deep a definition nests child flows, with itself; or the names of a recursion."""
    if name in above:
        return [*above[above.index(name) :], name]
    if len(above) > MAX_DEPTH:
        return MAX_DEPTH + 1
    if (name, version) not in known:
        deepest: int | list[str] = 1
        for _, child in _children(find(name, version) or {"nodes": {}}):
            found = _depth(child["flow"], child.get("version"), find, [*above, name], known)
            if isinstance(found, list):
                # Whether it recurs depends on the definitions above, so it is not remembered.
                return found
            deepest = max(deepest, found + 1) if isinstance(deepest, int) else deepest
        known[name, version] = deepest
    return known[name, version]
