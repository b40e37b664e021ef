"""Waits for events: nodes of flows, and the flow of a waiting task (F6), whose end wakes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.core.access import namespace_of
from penstock.core.completion import Outcome

# The node of a task's children, and that of its event.
CHILDREN, EVENT = "children", "event"
# Children that exist at once, unless the stage names another number.
DEFAULT_PARALLEL = 1_000
# More children than a task may have.
_ALL = 1_000_000


def event_problem(flow: str, event: str) -> str | None:
    """Why an event can never end a wait; None if it can.

    Args:
        flow: name of the definition that waits, or type of the task.
        event: name of the event.
    """
    own, other = namespace_of(flow), namespace_of(event)
    if own == other:
        return None
    return (
        f"the event {event!r} is in the namespace {other}, and only those of {own} can come: correct the name"
    )


def waiting_definition(outcome: Outcome, terms: Mapping[str, Any]) -> dict[str, Any]:
    """The definition of the flow.

    The children are in its inputs, and each names its type. All of them may fail: the stage that
    follows receives their number, and decides.

    Args:
        outcome: `SPAWN` or `WAIT`.
        terms: `spawn` or `wait` of `stage-results.schema.json`.
    """
    node: dict[str, Any]
    if outcome is Outcome.SPAWN:
        enough = {"k": int(terms["k"])} if "k" in terms else {"tolerate": _ALL}
        name, node = (
            CHILDREN,
            {
                "kind": "map",
                "items": "inputs.children",
                "parallel": int(terms.get("parallel", DEFAULT_PARALLEL)),
                **enough,
                "each": {"kind": "task", "type": "", "spawned": True},
            },
        )
    else:
        name, node = EVENT, {"kind": "wait", "event": terms["event"]}
        if terms.get("key"):
            # A JSON string is a literal of the expression language, too, but for escaped pairs of
            # surrogates.
            node["key"] = json.dumps(terms["key"], ensure_ascii=False)
        if "timeout_s" in terms:
            node["finish_within_s"] = terms["timeout_s"]
    definition: dict[str, Any] = {"nodes": {name: node}}
    if name == EVENT:
        # The results of children are read for the context of the stage that they wake. As an output
        # of the flow they would be collected twice.
        definition["output"] = f"nodes.{name}.output"
    return definition
