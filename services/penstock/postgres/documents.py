"""Rows of PostgreSQL as the documents that the API shows and the archive keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from penstock.contracts import subscription
from penstock.core.task import Priority
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


def detail(row: Mapping[str, Any]) -> dict[str, Any]:
    """A task with its context, result, attempts and callbacks; large contexts as references.

    Args:
        row: as `penstock.postgres.tasks.get` returns it.
    """
    document = summary(row)
    document["error"] = _error(row)
    context = context_of(row)
    if context is not None:
        document.update(context.to_wire())
    result = context_of(row, "result")
    if result is not None:
        shown = result.to_wire("result")
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


def archived(row: Mapping[str, Any]) -> bytes:
    """A task as a line of the archive: `detail`, and with each callback the body that was sent.

    Args:
        row: as `penstock.postgres.history.as_task` returns it.
    """
    document = detail(row)
    for shown, callback in zip(document["callbacks_owed"], row["callbacks_owed"], strict=True):
        # As PostgreSQL writes bytes into JSON: \x and hexadecimal digits. The bodies are JSON, so text.
        shown["body"] = bytes.fromhex(callback["body"][2:]).decode(errors="replace")
    line = orjson.dumps(document, option=orjson.OPT_UTC_Z)
    # A context is kept as it came; between the values of its JSON there may be line feeds, within them none.
    return line.replace(b"\n", b" ") + b"\n"


def _error(row: Mapping[str, Any]) -> dict[str, Any] | None:
    return orjson.loads(row["error"]) if row["error"] else None
