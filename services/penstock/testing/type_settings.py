"""The task types of a pipeline: those that the worker's code declares, and those of a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.worker.registered import Registered


def type_settings(
    registered: Registered, given: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The settings of each type, as fields of `task-type.schema.json`.

    A type of the code has its settings. Any other type of a stage has its first registered stage,
    and defaults. Those of a test have precedence.

    Args:
        registered: the parts of the worker.
        given: settings of the test, by name.
    """
    found = {each.name: each.settings() for each in registered.types}
    declared = set(found)
    for type_name, stage in registered.stages:
        if type_name not in declared:
            found.setdefault(type_name, {"first_stage": stage})
    for name, settings in given.items():
        found[name] = {**found.get(name, {}), **settings}
    return found
