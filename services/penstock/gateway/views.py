"""Rows of PostgreSQL as the documents of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from penstock.contracts import subscription
from penstock.contracts.context import Context
from penstock.core.task import Priority
from penstock.errors import CorruptObject
from penstock.objects import ObjectStore
from penstock.postgres.tasks import context_of

_SAME = (
    "id",
    "type",
    "state",
    "stage",
    "step",
    "attempt",
    "idempotency_key",
    "events",
    "worker",
    "pausing",
    "due_at",
    "created_at",
    "updated_at",
    "finished_at",
)
_OF_ATTEMPT = ("step", "attempt", "stage", "outcome", "worker", "started_at", "finished_at")
_OF_CALLBACK = ("id", "target", "state", "attempt", "error", "due_at", "created_at", "finished_at")


def summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """A task as lists show it: without context, result, history and tracebacks."""
    document = {name: row[name] for name in _SAME}
    document["priority"] = Priority(row["priority"]).name
    # In types that are released key by key the empty one is written for none.
    document["key"] = row["key"] or None
    document["labels"] = orjson.loads(row["labels"]) if row["labels"] else {}
    document["callbacks"] = subscription.shown(subscription.from_columns(row["callbacks"]))
    error = _error(row)
    document["error"] = {k: v for k, v in error.items() if k != "traceback"} if error else None
    return document


async def detail(row: Mapping[str, Any], objects: ObjectStore | None) -> dict[str, Any]:
    """A task with its context, result, attempts and callbacks.

    Args:
        row: as `penstock.postgres.tasks.get` returns it.
        objects: resolves large contexts; None leaves the references.

    Raises:
        ObjectsUnavailable: the object store does not answer.
    """
    document = summary(row)
    document["error"] = _error(row)
    context = context_of(row)
    if context is not None:
        document.update(await _shown(context, "context", objects))
    result = context_of(row, "result")
    if result is not None:
        shown = await _shown(result, "result", objects)
        document["result_type"] = shown.pop("content_type")
        document.update(shown)
    document["attempts"] = [
        {**{name: attempt[name] for name in _OF_ATTEMPT}, "error": _error(attempt)}
        for attempt in row["attempts"]
    ]
    document["callbacks_owed"] = [
        {name: callback[name] for name in _OF_CALLBACK} for callback in row["callbacks_owed"]
    ]
    return document


async def _shown(context: Context, name: str, objects: ObjectStore | None) -> dict[str, Any]:
    if context.ref is None or objects is None:
        return context.to_wire(name)
    try:
        return (await objects.check_out(context)).to_wire(name)
    except CorruptObject as error:
        # The task itself can still be looked at.
        return {**context.to_wire(name), f"{name}_error": str(error)}


def _error(row: Mapping[str, Any]) -> dict[str, Any] | None:
    return orjson.loads(row["error"]) if row["error"] else None
