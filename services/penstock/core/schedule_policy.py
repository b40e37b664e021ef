"""Decides what becomes of the ticks of a schedule: started, queued or skipped.

Each tick is decided once. What is skipped is returned with its reason, so that it can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

# A tick that is older was missed: no service looked when it was due.
MISSED_AFTER = timedelta(seconds=60)
# Most ticks that are queued, and most that a catch-up starts.
MAX_QUEUED = 1_000


class CatchUp(StrEnum):
    """The missed ticks that start: the latest one, none, or all up to a limit."""

    LATEST = "latest"
    NONE = "none"
    ALL = "all"


class Overlap(StrEnum):
    """The outcome of a tick while a flow of the schedule is running."""

    SKIP = "skip"
    QUEUE_ONE = "queue_one"
    QUEUE_ALL = "queue_all"
    CANCEL_OTHER = "cancel_other"
    ALLOW = "allow"


class SkipReason(StrEnum):
    """Why a tick started no flow."""

    CATCH_UP = "catch_up"
    OVERLAP = "overlap"
    QUEUE_FULL = "queue_full"
    PAUSED = "paused"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a schedule.

    Attributes:
        catch_up: which missed ticks start.
        catch_up_limit: with `all`, most missed ticks that start; the latest ones.
        catch_up_rate: with `all`, flows a second.
        overlap: what happens while a flow is running.
    """

    catch_up: CatchUp = CatchUp.LATEST
    catch_up_limit: int = 100
    catch_up_rate: float = 10.0
    overlap: Overlap = Overlap.SKIP

    def problem(self) -> str | None:
        """Why the rules contradict each other; None if they do not."""
        if self.catch_up is CatchUp.ALL and self.overlap not in (Overlap.QUEUE_ALL, Overlap.ALLOW):
            return (
                f"catch_up `all` starts several flows, and overlap `{self.overlap}` would skip all but one: "
                "choose overlap `queue_all` or `allow`"
            )
        return None

    @property
    def kept(self) -> int:
        """How many of the latest ticks decide: those that may start, two on time, and one more."""
        return 3 + (self.catch_up_limit if self.catch_up is CatchUp.ALL else 1)


@dataclass(frozen=True, slots=True)
class Due:
    """The ticks that are due.

    Attributes:
        first: the earliest one.
        latest: the latest ones, in order; at least `Rules.kept`, unless there are fewer.
        is_all: whether `latest` has all of them.
    """

    first: datetime
    latest: Sequence[datetime]
    is_all: bool


@dataclass(frozen=True, slots=True)
class Skip:
    """Ticks that start no flow.

    Attributes:
        first: the earliest one.
        last: the latest one.
        count: their number; None if they were not counted.
        reason: why.
        detail: the error, for the reason `error`.
    """

    first: datetime
    last: datetime
    count: int | None
    reason: SkipReason
    detail: str | None = None


@dataclass(slots=True)
class Decision:
    """The outcome of the ticks that are due, and of those that were queued.

    Attributes:
        starts: ticks whose flows start now, in order.
        cancels: whether the flows that are running are cancelled first.
        queued: ticks that wait.
        skips: ticks that start no flow.
        queue_at: when the next queued tick may start; None if time does not decide it.
    """

    starts: list[datetime] = field(default_factory=list)
    cancels: bool = False
    queued: list[datetime] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    queue_at: datetime | None = None


def decide(
    rules: Rules,
    due: Due | None,
    queued: Sequence[datetime],
    *,
    is_running: bool,
    now: datetime,
    queue_at: datetime | None = None,
) -> Decision:
    """Decides about all ticks that are due, and about those that were queued.

    Args:
        rules: of the schedule.
        due: the ticks that are due; None if none is.
        queued: ticks that wait since earlier decisions, in order.
        is_running: whether a flow of the schedule is running.
        now: the current time.
        queue_at: of the last decision.
    """
    decision = Decision(queued=list(queued))
    missed, on_time = _caught_up(rules, due, now, decision)
    if rules.overlap is Overlap.ALLOW:
        decision.starts = on_time
        _enqueue(missed, decision)
        _start_by_rate(rules, decision, now, queue_at)
        return decision
    kept = missed + on_time
    # The rule may have changed since ticks were queued: they keep their turn.
    if rules.overlap is Overlap.CANCEL_OTHER and kept:
        kept = decision.queued + kept
        decision.queued = []
        _skip(kept[:-1], SkipReason.OVERLAP, decision)
        decision.cancels = is_running
        decision.starts = kept[-1:]
        return decision
    if not is_running:
        waiting = decision.queued + kept
        decision.starts, kept = waiting[:1], kept if decision.queued else kept[1:]
        decision.queued = decision.queued[1:]
    if rules.overlap is Overlap.QUEUE_ALL:
        _enqueue(kept, decision)
    elif rules.overlap is Overlap.QUEUE_ONE:
        waiting = decision.queued + kept
        _skip(waiting[:-1], SkipReason.OVERLAP, decision)
        decision.queued = waiting[-1:]
    else:
        _skip(kept, SkipReason.OVERLAP, decision)
    return decision


def _caught_up(
    rules: Rules, due: Due | None, now: datetime, decision: Decision
) -> tuple[list[datetime], list[datetime]]:
    """The missed ticks that start, and those that are on time."""
    if due is None:
        return [], []
    missed = [tick for tick in due.latest if now - tick > MISSED_AFTER]
    on_time = [*due.latest[len(missed) :]]
    match rules.catch_up:
        case CatchUp.ALL:
            kept = missed[-rules.catch_up_limit :]
        case CatchUp.LATEST:
            kept = [] if on_time else missed[-1:]
        case CatchUp.NONE:
            kept = []
    left = missed[: len(missed) - len(kept)]
    if not due.is_all and not left:
        # The span between the first tick and those that start was not enumerated.
        raise ValueError("the latest ticks must have one more than can start")
    if left:
        first, count = (left[0], len(left)) if due.is_all else (due.first, None)
        decision.skips.append(Skip(first, left[-1], count, SkipReason.CATCH_UP))
    return kept, on_time


def _enqueue(ticks: Sequence[datetime], decision: Decision) -> None:
    room = max(0, MAX_QUEUED - len(decision.queued))
    decision.queued += ticks[:room]
    _skip(ticks[room:], SkipReason.QUEUE_FULL, decision)


def _start_by_rate(rules: Rules, decision: Decision, now: datetime, queue_at: datetime | None) -> None:
    if not decision.queued:
        return
    if queue_at is not None and queue_at > now:
        # The clock may have been set back: the wait is at most that of one start.
        latest = now + timedelta(seconds=max(1.0, 1 / rules.catch_up_rate))
        decision.queue_at = min(queue_at, latest)
        return
    count = min(len(decision.queued), max(1, int(rules.catch_up_rate)))
    decision.starts = decision.queued[:count] + decision.starts
    decision.queued = decision.queued[count:]
    decision.queue_at = now + timedelta(seconds=count / rules.catch_up_rate)


def _skip(ticks: Sequence[datetime], reason: SkipReason, decision: Decision) -> None:
    if ticks:
        decision.skips.append(Skip(ticks[0], ticks[-1], len(ticks), reason))
