"""The report of a check: offenders by rule, and repairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Rule(StrEnum):
    """The rules of the invariant."""

    OVERDUE = "overdue"
    UNRELEASED = "unreleased"
    RECORDLESS = "recordless"
    UNPROVEN = "unproven"
    UNWATCHED = "unwatched"
    UNHEARD = "unheard"
    WAITING = "waiting"
    UNSENT = "unsent"
    UNPUBLISHED = "unpublished"
    REFUSED = "refused"
    UNDELIVERED = "undelivered"
    UNBEGUN = "unbegun"
    HELD = "held"
    UNREAD = "unread"
    AHEAD = "ahead"
    MISPLACED = "misplaced"
    LOST = "lost"
    MISCOUNTED = "miscounted"
    STALLED = "stalled"
    LEFTOVER = "leftover"
    MISCOUNTED_FLOW = "miscounted_flow"
    UNAPPLIED = "unapplied"
    UNMATCHED = "unmatched"


@dataclass(frozen=True, slots=True)
class Offender:
    """A task, record or row that breaks a rule.

    Attributes:
        rule: that it breaks.
        what: "task", "release", "event", "callback", "result" of a callback, "operation", "topic",
            "counter" or "flow".
        id: its id; of a topic, its name and partition; of a counter, type and stage.
        lacks: one sentence.
    """

    rule: Rule
    what: str
    id: int | str
    lacks: str


@dataclass(slots=True)
class Offenders:
    """The offenders against one rule: the first of them, and how many there are.

    Attributes:
        first: as many as are shown.
        count: of all.
    """

    first: list[Offender]
    count: int


@dataclass(slots=True)
class Report:
    """The result of a check.

    Attributes:
        tasks: number by state.
        callbacks: number by state.
        moved: ingest offsets that did not fit their topic and were moved in the last seven days, by
            reason. They are no offenders: ingest reads on where it must.
        missing: tasks that recent records on Kafka name and the database does not have, because it
            went back. They are no offenders: only their clients can submit them again.
        offenders: the first against each rule; empty when the invariant holds.
        counts: how many there are against each rule.
        repaired: number of repaired offenders by rule; None without repair.
        remaining: number of offenders that a second check found, by rule.
    """

    tasks: dict[str, int] = field(default_factory=dict)
    callbacks: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    offenders: list[Offender] = field(default_factory=list)
    counts: Counter[Rule] = field(default_factory=Counter)
    repaired: Counter[Rule] | None = None
    remaining: Counter[Rule] = field(default_factory=Counter)

    def add(self, found: Iterable[Offenders], show: int) -> None:
        """Adds offenders, `show` of each rule."""
        shown = Counter(offender.rule for offender in self.offenders)
        for of_rule in found:
            if not of_rule.first:
                continue
            rule = of_rule.first[0].rule
            self.counts[rule] += of_rule.count
            for offender in of_rule.first[: show - shown[rule]]:
                self.offenders.append(offender)
                shown[rule] += 1

    @property
    def clean(self) -> bool:
        """Whether the check found no offender."""
        return not self.counts

    @property
    def well(self) -> bool:
        """Whether no offender is left, after a repair if there was one."""
        return self.clean or (self.repaired is not None and not self.remaining)

    def to_wire(self) -> dict[str, Any]:
        """For `--json`."""
        wire = {
            "clean": self.clean,
            "tasks": self.tasks,
            "callbacks": self.callbacks,
            "moved": self.moved,
            "missing": self.missing,
            "counts": {rule.value: count for rule, count in self.counts.items()},
            "offenders": [
                {"rule": o.rule.value, "what": o.what, "id": o.id, "lacks": o.lacks} for o in self.offenders
            ],
        }
        if self.repaired is not None:
            wire["repaired"] = {rule.value: count for rule, count in self.repaired.items()}
            wire["remaining"] = {rule.value: count for rule, count in self.remaining.items()}
        return wire
