"""What becomes of tasks that have ended: when they move to history, and how a day of history is retired. Pure.

A day is sealed, archived and dropped, in this order, each step noted before the next begins; so whoever takes over after
a crash goes on from the notes. In doubt it keeps: what is not known to be archived is not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Policy:
    """How long what is kept where.

    Attributes:
        keep: how long a task stays where it was after it has ended.
        retain: how long a day stays in history after it is over; None is for ever.
        archive: whether a day is archived before it is dropped.
    """

    keep: timedelta
    retain: timedelta | None
    archive: bool

    def ended_before(self, now: datetime) -> datetime:
        """The moment before which a task must have ended to be moved."""
        return now - self.keep

    def is_over(self, day: date, now: datetime) -> bool:
        """Whether a day is to be retired."""
        return self.retain is not None and span_of(day)[1] + self.retain <= now


class Step(StrEnum):
    """What is done next about a part of history that is over."""

    SEAL = "seal"
    ARCHIVE = "archive"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Part:
    """A partition of history as its notes have it.

    Attributes:
        day: on which its tasks ended (UTC).
        number: from 1; another one begins when a task is moved after its day was dropped.
        tasks: how many it has.
        sealed: no task is moved into it any more.
        archived: its object was found whole.
    """

    day: date
    number: int
    tasks: int
    sealed: bool = False
    archived: bool = False

    @property
    def object_key(self) -> str:
        """Where its archive is kept."""
        return f"history/day={self.day}/part-{self.number}.ndjson.gz"


def next_step(part: Part, policy: Policy, now: datetime) -> Step | None:
    """What to do next about a part that is there; None while it stays."""
    if not policy.is_over(part.day, now):
        return None
    if not part.sealed:
        return Step.SEAL
    if policy.archive and not part.archived:
        return Step.ARCHIVE
    return Step.DROP


def day_of(moment: datetime) -> date:
    """The UTC day of a moment."""
    return moment.astimezone(UTC).date()


def span_of(day: date) -> tuple[datetime, datetime]:
    """From when a day lasts, and until (not with) when."""
    begin = datetime.combine(day, time(), UTC)
    return begin, begin + _DAY


def rest_s(tasks: int, took_s: float, rate: float) -> float:
    """Seconds to rest after a batch: no more than `rate` tasks a second, and idle at least half of the time.

    Args:
        tasks: looked at in the batch.
        took_s: seconds it took.
        rate: tasks a second, above 0.
    """
    return max(tasks / rate - took_s, took_s)
