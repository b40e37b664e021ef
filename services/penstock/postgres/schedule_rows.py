"""A schedule: the settings of its user, and its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from penstock.contracts import subscription
from penstock.contracts.subscription import Entry
from penstock.core.schedule_policy import CatchUp, Overlap, Rules
from penstock.core.task import Priority

_WIRE = (
    "name",
    "flow",
    "version",
    "cron",
    "zone",
    "input",
    "catch_up",
    "catch_up_limit",
    "catch_up_rate",
    "overlap",
    "paused",
    "next_tick",
    "last_tick",
    "queued",
    "started",
    "error",
    "created_at",
    "updated_at",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a schedule, from a user.

    Attributes:
        name: of the schedule; its namespace is that of the name.
        flow: the definition.
        version: of the definition; None is the newest one at each tick.
        cron: five fields.
        zone: of the IANA database.
        input: expression for the inputs of a flow; None is without inputs.
        priority: of its flows.
        labels: of its flows.
        events: of its flows, "final" or "all"; None is "final".
        callbacks: of its flows.
        rules: for catch-up and overlap.
        paused: whether no tick starts a flow.
    """

    name: str
    flow: str
    cron: str
    version: int | None = None
    zone: str = "UTC"
    input: str | None = None
    priority: Priority = Priority.MEDIUM
    labels: Mapping[str, str] | None = None
    events: str | None = None
    # Not in the repr, because headers are secrets.
    callbacks: tuple[Entry, ...] = field(default=(), repr=False)
    rules: Rules = field(default_factory=Rules)
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """A row of `schedule`.

    Attributes:
        settings: what its user said.
        position: ticks up to this moment are decided.
        next_tick: the first tick after it; None if there is none.
        queued: ticks that wait, in order.
        queue_at: when the next of them may start.
        row: all columns.
    """

    settings: Settings
    position: datetime
    next_tick: datetime | None
    queued: Sequence[datetime]
    queue_at: datetime | None
    row: Mapping[str, Any]

    @property
    def now(self) -> datetime:
        """The database's clock when the row was locked."""
        moment: datetime = self.row["now"]
        return moment

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of answers."""
        return {
            **{name: self.row[name] for name in _WIRE},
            "events": self.settings.events or "final",
            "priority": self.settings.priority.name,
            "labels": dict(self.settings.labels or {}),
            "callbacks": subscription.masked(self.settings.callbacks),
        }


def settings_of(row: Mapping[str, Any]) -> Settings:
    """The settings in the columns of a row."""
    return Settings(
        name=row["name"],
        flow=row["flow"],
        version=row["version"],
        cron=row["cron"],
        zone=row["zone"],
        input=row["input"],
        priority=Priority(row["priority"]),
        labels=orjson.loads(row["labels"]) if row["labels"] else None,
        events=row["events"],
        callbacks=subscription.from_columns(row["callbacks"]),
        rules=Rules(
            catch_up=CatchUp(row["catch_up"]),
            catch_up_limit=row["catch_up_limit"],
            catch_up_rate=row["catch_up_rate"],
            overlap=Overlap(row["overlap"]),
        ),
        paused=row["paused"],
    )


def from_row(row: Any) -> Schedule:
    """The schedule of a row."""
    return Schedule(settings_of(row), row["position"], row["next_tick"], row["queued"], row["queue_at"], row)
