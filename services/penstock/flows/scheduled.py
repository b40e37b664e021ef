"""The flow of a tick: the inputs that its schedule gives it, and its start."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from penstock.cel import compile_expression
from penstock.errors import Invalid, InvalidExpression, InvalidRecord
from penstock.postgres.flow_definitions import Reached
from penstock.postgres.flow_starts import FlowStart, inputs_of
from penstock.postgres.schedule_rows import Settings

# The values that the expression of a schedule reads.
VARIABLES = frozenset({"schedule", "tick", "local_tick"})
# Tells a definition that a schedule of tasks has made from one that a user has uploaded.
OF_TASKS = "One task at each tick of the schedule with this name, which has made this definition."
_CONTEXT = '{"context":\n%s\n}'


def check_input(expression: str, *, of_task: bool = False) -> None:
    """Checks the expression for the inputs, or for the context of a task.

    Raises:
        InvalidRecord: it is wrong; with the place.
    """
    try:
        compiled = compile_expression(expression, VARIABLES)
    except InvalidExpression as error:
        raise InvalidRecord(_text(error), pointer="/input") from error
    if not of_task and compiled.type not in ("DYN", "MAP"):
        raise InvalidRecord(
            f'the inputs are an object, and the expression gives {compiled.type}: write {{"name": value, …}}',
            pointer="/input",
        )


def task_definition(name: str, version: int, type_name: str, stage: str | None) -> dict[str, Any]:
    """The definition of a schedule that runs plain tasks: one node, whose context is the input.

    Args:
        name: of the schedule.
        version: of the definition.
        type_name: of the tasks.
        stage: their first one; None is that of the type.
    """
    node = {"kind": "task", "type": type_name, "input": "inputs.context"}
    if stage is not None:
        node["stage"] = stage
    return {
        "flow": name,
        "version": version,
        "description": OF_TASKS,
        "inputs": {"context": {"default": None}},
        "nodes": {"task": node},
        "output": "nodes.task.output",
    }


def task_input(expression: str | None) -> str | None:
    """The expression for the inputs of such a definition, from one for the context of its task."""
    return None if expression is None else _CONTEXT % expression


def inputs_at(settings: Settings, tick: datetime) -> Mapping[str, Any]:
    """The inputs that a schedule gives to the flow of a tick.

    Raises:
        InvalidRecord: they cannot be evaluated, or are no object.
    """
    if settings.input is None:
        return {}
    moment = tick.astimezone(UTC)
    data = {
        "schedule": settings.name,
        "tick": moment.isoformat().replace("+00:00", "Z"),
        "local_tick": moment.astimezone(ZoneInfo(settings.zone)).isoformat(),
    }
    try:
        value = compile_expression(settings.input, VARIABLES).evaluate(data)
    except InvalidExpression as error:
        raise InvalidRecord(_text(error), pointer="/input") from error
    if not isinstance(value, dict):
        raise InvalidRecord("the inputs are an object, and the expression gave none", pointer="/input")
    return value


def scheduled_start(
    settings: Settings,
    tick: datetime,
    reached: Reached,
    *,
    backfill: int | None = None,
    rerun_of: int | None = None,
) -> FlowStart:
    """The start of a tick's flow; its inputs are inline.

    Args:
        settings: of the schedule.
        tick: nominal time.
        reached: has its definition, if there is one.
        backfill: the backfill that starts it.
        rerun_of: the flow of the tick that it repeats.

    Raises:
        Invalid: there is no such definition, or its inputs do not fit.
    """
    outline = reached.get(settings.flow, settings.version)
    if outline is None:
        which = "" if settings.version is None else f"version {settings.version} of "
        raise InvalidRecord(
            f"there is no {which}flow definition {settings.flow!r}: upload it first",
            pointer="/flow" if settings.version is None else "/version",
        )
    given = inputs_at(settings, tick)
    inputs = inputs_of(outline, given, "/input")
    inputs.require_shallow()
    return FlowStart(
        name=outline.name,
        version=outline.version,
        versions=reached.versions_of(outline) or None,
        unfinished=outline.nodes,
        inputs=inputs,
        priority=settings.priority,
        labels=settings.labels,
        events=settings.events,
        callbacks=settings.callbacks or None,
        rerun_of=rerun_of,
        schedule=settings.name,
        tick=tick,
        backfill=backfill,
    )


def reason(error: Invalid) -> str:
    """An error as the record of skipped ticks has it."""
    return str(error)[:1_000]


def _text(error: InvalidExpression) -> str:
    place = f" (at {error.line}:{error.column} of the expression)" if error.line else ""
    return f"{error.reason}{place}"
