"""Schedules of plain tasks: each is that of a flow of one task, whose definition it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.access import Grant, namespace_of
from penstock.core.flow.outline import is_same
from penstock.errors import Conflict, InvalidRecord
from penstock.flows.scheduled import OF_TASKS, check_input, task_definition, task_input
from penstock.postgres import flow_definitions
from penstock.postgres.types import TypeCache

# Fields of a schedule of tasks that its definition has, and not the schedule.
_OWN = ("type", "stage")


async def require_type(types: TypeCache, grant: Grant, name: str, type_name: str) -> None:
    """Requires that a schedule may start tasks of a type.

    Args:
        types: the registered types.
        grant: of the request.
        name: of the schedule.
        type_name: of the tasks.

    Raises:
        InvalidRecord: there is no such type that the request may see, or in another namespace.
        PostgresUnavailable: the database is unavailable.
    """
    await types.require([type_name])
    if types.get(type_name) is None or not grant.covers(type_name):
        raise InvalidRecord(f"there is no task type {type_name!r}", pointer="/type")
    if namespace_of(type_name) != namespace_of(name):
        raise InvalidRecord(
            f"the type is in the namespace {namespace_of(type_name)}, and the schedule in "
            f"{namespace_of(name)}: begin its name with the same namespace",
            pointer="/type",
        )


async def as_flow(connection: Any, name: str, raw: Mapping[str, Any], actor: str | None) -> Mapping[str, Any]:
    """The settings of a schedule of tasks as those of its flow, whose definition is stored.

    The same tasks keep their version.

    Args:
        connection: in the transaction that writes the schedule.
        name: of the schedule.
        raw: its settings, without faults.
        actor: who writes it.

    Raises:
        Conflict: a user's definition has the name.
        InvalidRecord: the expression is too large within the inputs of the flow.
        PostgresUnavailable: the database is unavailable.
    """
    given = task_input(raw.get("input"))
    if given is not None:
        # Within the flow's inputs the expression is longer, and one level deeper.
        check_input(given)
    newest = await flow_definitions.find(connection, name, None)
    if newest is not None and newest.definition.get("description") != OF_TASKS:
        raise Conflict(
            f"the schedule of tasks would make a flow definition {name!r}, and there is one: choose another name"
        )

    def definition(version: int) -> dict[str, Any]:
        return task_definition(name, version, raw["type"], raw.get("stage"))

    if newest is None:
        version = 1
    elif is_same(newest.definition, definition(newest.version)):
        version = newest.version
    else:
        version = newest.version + 1
    await flow_definitions.insert(connection, definition(version), actor)
    others = {field: value for field, value in raw.items() if field not in _OWN}
    return {**others, "flow": name, "version": version, "input": given}
