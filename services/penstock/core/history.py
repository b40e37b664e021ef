"""History of finished tasks and flows: when they move, and the steps that retire a day. Pure.

A day is sealed, archived and dropped, in this order. Each step is recorded before the next begins,
so the process that takes over after a crash continues from the record. When in doubt, nothing is
dropped: a day must be known to be archived.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Policy:
    """Retention of finished tasks.

    Attributes:
        keep: how long a finished task stays in the hot tables.
        retain: how long a day stays in history after its end; None is forever.
        archive: whether a day is archived before it is dropped.
    """

    keep: timedelta
    retain: timedelta | None
    archive: bool

    def ended_before(self, now: datetime) -> datetime:
        """Tasks that ended before this moment move to history."""
        return now - self.keep

    def is_expired(self, day: date, now: datetime) -> bool:
        """Whether a day is to be retired."""
        return self.retain is not None and span_of(day)[1] + self.retain <= now


class Step(StrEnum):
    """A step that retires a partition of history."""

    SEAL = "seal"
    ARCHIVE = "archive"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Part:
    """A partition of history, as recorded in `history_part`.

    Attributes:
        day: on which its tasks ended (UTC).
        number: from 1; a further part begins when a task moves after its day was dropped.
        tasks: how many it has.
        sealed: no further task moves into it.
        archived: its objects were verified.
        flows: how many flows it has.
    """

    day: date
    number: int
    tasks: int
    sealed: bool = False
    archived: bool = False
    flows: int = 0

    @property
    def object_key(self) -> str:
        """The object that archives its tasks."""
        return f"history/day={self.day}/part-{self.number}.ndjson.gz"

    @property
    def flows_key(self) -> str:
        """The object that archives its flows."""
        return f"flow-history/day={self.day}/part-{self.number}.ndjson.gz"


def next_step(part: Part, policy: Policy, now: datetime) -> Step | None:
    """The next step for a part that has not been dropped; None while its day is retained."""
    if not policy.is_expired(part.day, now):
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
    """The first moment of a day, and the first moment of the next."""
    begin = datetime.combine(day, time(), UTC)
    return begin, begin + _DAY


def rest_s(tasks: int, took_s: float, rate: float) -> float:
    """Seconds to rest after a batch: at least its duration, and enough for the rate.

    Args:
        tasks: examined in the batch.
        took_s: seconds it took.
        rate: tasks a second, above 0.
    """
    return max(tasks / rate - took_s, took_s)
