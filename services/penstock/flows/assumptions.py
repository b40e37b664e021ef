"""Reads the assumptions of a simulated flow, and completes them from the definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema_rs
import orjson

from penstock.contracts.files import schemas_folder
from penstock.contracts.validation import faults as schema_faults
from penstock.core.flow.simulation import Assumption
from penstock.core.flow.state import Outcome
from penstock.flows.faults import Fault, pointer
from penstock.flows.loading import load

# Seconds that a task takes if nothing is assumed.
DEFAULT_TAKES_S = 1.0

# The fields that mean something for nodes of some kinds only.
_FIELDS = {
    "case": {"switch"},
    "items": {"map"},
    "failing": {"map"},
    "takes_s": {"task", "flow", "wait", "timer", "map"},
}


@cache
def _schema() -> jsonschema_rs.Draft202012Validator:
    document = orjson.loads((schemas_folder() / "flows" / "assumptions.schema.json").read_bytes())
    return jsonschema_rs.Draft202012Validator(document)


def read_assumptions(
    data: bytes | None, definition: Mapping[str, Any], measured: Mapping[str, float] | None = None
) -> tuple[dict[str, Assumption], list[Fault]]:
    """The assumptions of each node, and the faults of the file.

    Args:
        data: the file, in YAML or JSON; None assumes the defaults.
        definition: a valid definition.
        measured: seconds of nodes from real runs, which hold where the file has none for the node.
    """
    measured = measured or {}
    if data is None:
        return _complete({}, definition, measured), []
    loaded = load(data)
    found = list(loaded.faults)
    if not found:
        found += [
            Fault("schema", error.pointer, error.reason)
            for error in schema_faults(_schema(), loaded.document)
        ]
    if not found:
        found += _node_faults(loaded.document, definition)
    if found:
        return {}, [loaded.place(fault) for fault in found]
    return _complete(loaded.document, definition, measured), []


def tasks_of(definition: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """The task type and the first stage of each node that runs tasks; without a stage None."""
    found = {}
    for name, node in definition["nodes"].items():
        task = node.get("each", node)
        if task["kind"] == "task":
            found[name] = task["type"], task.get("stage")
    return found


def _node_faults(document: Mapping[str, Any], definition: Mapping[str, Any]) -> Iterator[Fault]:
    for name, assumed in document.get("nodes", {}).items():
        at = ("nodes", name)
        node = definition["nodes"].get(name)
        if node is None:
            yield Fault("unknown_node", pointer(*at), f"the definition has no node {name!r}")
            continue
        for field in assumed:
            kinds = _FIELDS.get(field, {node["kind"]})
            if node["kind"] not in kinds:
                reason = f"node {name!r} is a {node['kind']}; `{field}` is for {', '.join(sorted(kinds))}"
                yield Fault("schema", pointer(*at, field), reason)
        if node["kind"] == "switch" and "case" in assumed:
            cases = [*(case["case"] for case in node["cases"]), node["else"]]
            if assumed["case"] not in cases:
                reason = f"switch {name!r} has the cases {', '.join(cases)}"
                yield Fault("unknown_case", pointer(*at, "case"), reason)


def _complete(
    document: Mapping[str, Any], definition: Mapping[str, Any], measured: Mapping[str, float]
) -> dict[str, Assumption]:
    usual_s = document.get("takes_s", DEFAULT_TAKES_S)
    found = {}
    for name, node in definition["nodes"].items():
        assumed = document.get("nodes", {}).get(name, {})
        default_s = {"wait": 0.0, "timer": node.get("delay_s", 0.0)}.get(node["kind"], usual_s)
        default_s = measured.get(name, default_s)
        found[name] = Assumption(
            takes_s=assumed.get("takes_s", default_s),
            outcome=Outcome(assumed.get("ends", Outcome.SUCCEEDED)),
            case=assumed.get("case", node.get("else", "")),
            # JSON Schema takes 2.0 for an integer.
            items=int(assumed.get("items", 1)),
            failing=frozenset(map(int, assumed.get("failing", ()))),
        )
    return found
