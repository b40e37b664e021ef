"""The settings of a schedule in a request: all their faults at once, and their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import Any

from penstock.contracts import subscription
from penstock.core.schedule_policy import CatchUp, Overlap, Rules
from penstock.core.task import Priority
from penstock.cron import cron_faults
from penstock.errors import Invalid, InvalidRecord
from penstock.flows.scheduled import check_input, scheduled_start
from penstock.gateway.openapi import conform, find_faults
from penstock.postgres.flow_definitions import Reached
from penstock.postgres.schedule_rows import Schedule, Settings

# The fields that decide whether a flow can start. In any zone it can.
_START_FIELDS = ("flow", "version", "input")


def own_faults(name: str, raw: Any) -> list[Invalid]:
    """The faults that need no database. A field with a wrong shape has no further fault.

    Raises:
        Invalid: the body is no object.
    """
    if not isinstance(raw, dict):
        conform(raw, "ScheduleSettings")
    found: list[Invalid] = list(find_faults({"name": name, **raw}, "ScheduleSettings"))
    sound = _sound(raw, found)
    if sound.get("name", name) != name:
        found.append(InvalidRecord("the name differs from that of the path: leave it out", pointer="/name"))
    found += _faults_of_subject(raw)
    found += cron_faults(sound.get("cron"), sound.get("zone"))
    found += _faults_of_values(sound)
    return found


def start_faults(name: str, raw: Mapping[str, Any], tick: datetime, reached: Reached) -> list[Invalid]:
    """The faults that a flow of the schedule would have at a tick.

    Args:
        name: of the schedule.
        raw: settings, which may have other faults.
        tick: any moment.
        reached: has the definition, if there is one.
    """
    sound = _sound(raw, own_faults(name, raw))
    if "flow" not in sound or any(field in raw and field not in sound for field in _START_FIELDS):
        return []
    fields = {field: sound[field] for field in (*_START_FIELDS, "zone") if field in sound}
    try:
        scheduled_start(settings_of(name, {"cron": "", **fields}, None), tick, reached)
    except Invalid as error:
        return [error]
    return []


def settings_of(name: str, raw: Mapping[str, Any], existing: Schedule | None) -> Settings:
    """The settings of a body without faults of its own."""
    version = raw.get("version")
    # A deployment that puts its schedules again must not resume one.
    paused = raw.get("paused", existing.settings.paused if existing else False)
    return Settings(
        name=name,
        flow=raw["flow"],
        cron=raw["cron"],
        version=None if version is None else int(version),
        zone=raw.get("zone", "UTC"),
        input=raw.get("input"),
        priority=Priority[raw.get("priority", Priority.MEDIUM.name)],
        labels=raw.get("labels") or None,
        events=raw.get("events"),
        callbacks=subscription.read(raw.get("callbacks", ())),
        rules=_rules(raw),
        paused=paused,
    )


def _sound(raw: Mapping[str, Any], found: list[Invalid]) -> dict[str, Any]:
    """The fields without a fault."""
    wrong: AbstractSet[str] = {fault.pointer[1:].partition("/")[0] for fault in found}
    return {field: value for field, value in raw.items() if field not in wrong}


def _faults_of_values(sound: Mapping[str, Any]) -> Iterator[Invalid]:
    if problem := _rules(sound).problem():
        yield InvalidRecord(problem, pointer="/overlap")
    try:
        subscription.read(sound.get("callbacks", ()))
    except Invalid as error:
        yield error
    try:
        if sound.get("input") is not None:
            check_input(sound["input"], of_task="type" in sound)
    except Invalid as error:
        yield error


def _faults_of_subject(raw: Mapping[str, Any]) -> Iterator[Invalid]:
    """Exactly one of a flow and a task type starts."""
    if ("flow" in raw) == ("type" in raw):
        yield InvalidRecord("name `flow`, a definition, or `type`, a task type: one of them", pointer="/flow")
    elif "type" in raw and raw.get("version") is not None:
        yield InvalidRecord("a task type has no versions: leave `version` out", pointer="/version")
    elif "flow" in raw and raw.get("stage") is not None:
        yield InvalidRecord("a flow has no first stage: its nodes have", pointer="/stage")


def _rules(raw: Mapping[str, Any]) -> Rules:
    defaults = Rules()
    return Rules(
        catch_up=CatchUp(raw.get("catch_up", defaults.catch_up)),
        # To JSON Schema 8.0 is an integer.
        catch_up_limit=int(raw.get("catch_up_limit", defaults.catch_up_limit)),
        catch_up_rate=float(raw.get("catch_up_rate", defaults.catch_up_rate)),
        overlap=Overlap(raw.get("overlap", defaults.overlap)),
    )
