"""Turns rows of tasks into the documents of the API and of the archive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from penstock.contracts import subscription
from penstock.core.attempt import AttemptId, count_of
from penstock.core.task import Priority
from penstock.postgres.columns import SHOWN
from penstock.postgres.tasks import context_of, flow_of
from penstock.postgres.timeline import timeline

_ATTEMPT_COLUMNS = ("step", "attempt", "stage", "outcome", "worker", "started_at", "finished_at")
_CALLBACK_COLUMNS = ("id", "target", "state", "attempt", "error", "due_at", "created_at", "finished_at")


def summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a task in lists, without its large and detailed fields."""
    document = {name: row[name] for name in SHOWN}
    document["attempt"] = count_of(row["attempt"])
    document["priority"] = Priority(row["priority"]).name
    # In types with a limit for each concurrency key, a task without one has the empty one in its
    # row.
    document["key"] = row["key"] or None
    if row["flow_id"] is not None:
        names = ("id", "node", "generation", "item")
        document["flow"] = flow_of({name: row[f"flow_{name}"] for name in names})
    # Only rows that are read to be shown have the column.
    if row.get("progress"):
        document["progress"] = row["progress"]
    document["labels"] = orjson.loads(row["labels"]) if row["labels"] else {}
    document["callbacks"] = subscription.masked(subscription.from_columns(row["callbacks"]))
    error = _error(row)
    document["error"] = {k: v for k, v in error.items() if k != "traceback"} if error else None
    return document


def detail(row: Mapping[str, Any], inline_bytes: int | None = None) -> dict[str, Any]:
    """The whole document of a task; large contexts, inputs and results are references.

    Args:
        row: a row of `penstock.postgres.tasks.get`.
        inline_bytes: for `timeline`.
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
        {
            **{name: attempt[name] for name in _ATTEMPT_COLUMNS},
            "error": _error(attempt),
            "log": AttemptId(row["id"], attempt["step"], attempt["attempt"]).log_path,
        }
        for attempt in row["attempts"]
    ]
    document["timeline"] = timeline(row, inline_bytes)
    document["callbacks_owed"] = [
        {name: callback[name] for name in _CALLBACK_COLUMNS} for callback in row["callbacks_owed"]
    ]
    return document


def archived(row: Mapping[str, Any]) -> bytes:
    """The line of a task in the archive: the document of `detail`, with the body of each callback.

    Args:
        row: a row of `penstock.postgres.history.as_task`.
    """
    document = detail(row)
    for shown, callback in zip(document["callbacks_owed"], row["callbacks_owed"], strict=True):
        # PostgreSQL writes bytes into JSON as \x and hexadecimal digits. Each body is JSON text.
        shown["body"] = bytes.fromhex(callback["body"][2:]).decode(errors="replace")
    line = orjson.dumps(document, option=orjson.OPT_UTC_Z)
    # A context is stored as it was submitted, so its JSON may have line feeds between values, but
    # none within strings.
    return line.replace(b"\n", b" ") + b"\n"


def archived_flow(row: Mapping[str, Any]) -> bytes:
    """The line of a flow in the archive: its row, with its nodes and those of earlier generations.

    Inputs, outputs and lists are JSON texts.

    Args:
        row: a row of `penstock.postgres.flow_history.as_flow`.
    """
    document = {
        **row,
        "versions": orjson.loads(row["versions"]) if row["versions"] else None,
        "labels": orjson.loads(row["labels"]) if row["labels"] else {},
        "callbacks": subscription.masked(subscription.from_columns(row["callbacks"])),
        "callbacks_owed": [
            {name: callback[name] for name in _CALLBACK_COLUMNS} for callback in row["callbacks_owed"]
        ],
    }
    # A text escapes its line feeds.
    return orjson.dumps(document, default=bytes.decode, option=orjson.OPT_UTC_Z) + b"\n"


def _error(row: Mapping[str, Any]) -> dict[str, Any] | None:
    return orjson.loads(row["error"]) if row["error"] else None
