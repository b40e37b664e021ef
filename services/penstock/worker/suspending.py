"""Reads the outcomes with which a task waits: `Spawn` and `Wait`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from penstock.contracts.context import Context
from penstock.core.completion import Outcome
from penstock.core.task import Priority
from penstock.worker.outcomes import Child, Spawn, Wait
from penstock.worker.typed_contexts import json_default

MAX_CHILDREN = 1_000_000
_TYPE = re.compile(r"[A-Za-z0-9_-]{1,100}")
_EVENT = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_MAX_TEXT = 200


def read_suspending(
    returned: Spawn | Wait, stage_name: Callable[[Any], str], most_children: int = MAX_CHILDREN
) -> tuple[Outcome, dict[str, Any]]:
    """The outcome that a handler returned, and the fields of its result.

    Args:
        returned: by the handler.
        stage_name: checks the name of a stage.
        most_children: of a `Spawn`.

    Raises:
        TypeError: a field has a wrong type or value.
        InvalidRecord: a context is not JSON.
    """
    if isinstance(returned, Wait):
        if not _EVENT.fullmatch(_text("the event of Wait", returned.event)):
            raise TypeError("Wait needs the name of an event: letters, digits, _, . and -")
        terms: dict[str, Any] = {"event": str(returned.event)}
        if returned.key:
            terms["key"] = _text("the key of Wait", returned.key)
        if returned.timeout_s is not None:
            if not 0 < returned.timeout_s <= 315_360_000:
                raise TypeError("timeout_s of Wait is above 0, and at most ten years")
            terms["timeout_s"] = float(returned.timeout_s)
        return Outcome.WAIT, {
            "next_stage": stage_name(returned.then),
            "context": Context.encode({"context": returned.context}, json_default),
            "terms": terms,
        }
    terms = {}
    for name, most in (("k", MAX_CHILDREN), ("parallel", 100_000)):
        value = getattr(returned, name)
        if value is not None:
            if not isinstance(value, int) or not 1 <= value <= most:
                raise TypeError(f"{name} of Spawn is a number from 1 to {most:,}")
            terms[name] = int(value)
    # A generator may have no end.
    children = [_child(each) for each in itertools.islice(returned.children, most_children + 1)]
    if len(children) > most_children:
        raise TypeError(f"Spawn has more than {most_children:,} children, which is the limit")
    return Outcome.SPAWN, {
        "next_stage": stage_name(returned.then),
        "context": Context.encode({"context": returned.context, "children": children}, json_default),
        "terms": terms,
    }


def _child(child: Any) -> dict[str, Any]:
    if not isinstance(child, Child):
        raise TypeError(f"the children of Spawn are Child objects, not {type(child).__name__}")
    if not _TYPE.fullmatch(_text("the type of a child", child.type)):
        raise TypeError(f"a child needs the name of a task type, not {child.type!r:.100}")
    wire: dict[str, Any] = {"type": str(child.type), "context": child.context}
    for name in ("stage", "key"):
        if (value := getattr(child, name)) is not None:
            wire[name] = _text(f"the {name} of a child", value)
    if child.priority is not None:
        if child.priority not in Priority.__members__:
            raise TypeError(f"the priority of a child is one of {', '.join(Priority.__members__)}")
        wire["priority"] = str(child.priority)
    return wire


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_TEXT or "\0" in value:
        raise TypeError(f"{what} is text of 1 to {_MAX_TEXT} characters without NUL")
    return str(value)
