"""The timeline of a task: the stages that it has entered, with their inputs and attempts.

The attempt that ends a stage keeps the stage's input. The task has the input of its last stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.core.task import IN_FLIGHT
from penstock.postgres.tasks import context_of

# `attempt.input_type` of a stage that handed its input on unchanged.
SAME_INPUT = "same"
# Only so many stages of a task keep their inputs (advance.sql).
KEPT_INPUTS = 64

_COLUMNS = ("attempt", "outcome", "worker", "queued_at", "started_at", "finished_at")


@dataclass(frozen=True, slots=True)
class Step:
    """A stage that a task has entered.

    Attributes:
        number: how many stages the task had entered before.
        stage: its name.
        input: its context; None if it was not kept.
        attempts: their rows, in order. One that is queued or running has no outcome.
    """

    number: int
    stage: str
    input: Context | None
    attempts: tuple[Mapping[str, Any], ...]


def steps_of(row: Mapping[str, Any]) -> list[Step]:
    """The steps of a task, in order; the last one is the present one.

    Args:
        row: of `penstock.postgres.tasks.get`.
    """
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for attempt in row["attempts"]:
        by_step.setdefault(attempt["step"], []).append(attempt)
    present = by_step.get(row["step"], [])
    # Attempts are read after their task, and may have ended meanwhile.
    if row["state"] in IN_FLIGHT and row["attempt"] not in (each["attempt"] for each in present):
        present = [*present, {name: row.get(name) for name in _COLUMNS}]
    steps = [Step(row["step"], row["stage"], context_of(row), tuple(present))]
    for number in sorted((number for number in by_step if number < row["step"]), reverse=True):
        attempts = by_step[number]
        following = steps[-1].input
        steps.append(Step(number, attempts[-1]["stage"], _kept(attempts[-1], following), tuple(attempts)))
    return steps[::-1]


def _kept(attempt: Mapping[str, Any], following: Context | None) -> Context | None:
    """The input of a stage, from its last attempt and the input of the following stage."""
    # History from before the migration lacks the columns.
    content_type, data, ref = (attempt.get(name) for name in ("input_type", "input", "input_ref"))
    if content_type is None:
        return None
    if content_type == SAME_INPUT:
        return following
    if isinstance(data, str):
        # PostgreSQL writes bytes into the JSON of history as \x and hexadecimal digits.
        data = bytes.fromhex(data[2:])
    return Context(ContentType(content_type), data=data, ref=ref and ObjectRef.from_wire(orjson.loads(ref)))


def timeline(row: Mapping[str, Any], inline_bytes: int | None = None) -> list[dict[str, Any]]:
    """The field `timeline` of a task's document.

    Args:
        row: of `penstock.postgres.tasks.get`.
        inline_bytes: the most bytes that the inputs have together; those behind are left out, but
            for their size. None is any.
    """
    documents, used = [], 0
    for step in steps_of(row):
        document: dict[str, Any] = {"step": step.number, "stage": step.stage}
        if step.input is not None:
            document["input_size"] = step.input.size
            used += 0 if step.input.ref else step.input.size
            shown = step.input.to_wire("input")
            document["input_type"] = shown.pop("content_type")
            if step.input.ref or inline_bytes is None or used <= inline_bytes:
                document |= shown
        document["attempts"] = [*map(_shown, step.attempts)]
        documents.append(document)
    return documents


def _shown(attempt: Mapping[str, Any]) -> dict[str, Any]:
    error = orjson.loads(attempt["error"]) if attempt.get("error") else None
    return {
        **{name: attempt.get(name) for name in _COLUMNS},
        # `attempts` of the document has the traceback.
        "error": error and {name: error[name] for name in ("kind", "message")},
    }
