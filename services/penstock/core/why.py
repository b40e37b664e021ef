"""Why a task is waiting (S8): one answer, whatever else would be true as well. Pure; what is known of it is the argument.

What comes first is what has to change first. A task that is at the gate (`ready`) is held by whoever paused it; then by a
part of the deployment that is not there; then by the limits, the one of its own key before those of all; and only
then by those who go before it. What has passed the gate (`queued`) waits for workers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from math import ceil
from typing import Any

from penstock.core.task import FINAL, State

# Those ahead are counted so far.
COUNTED = 10_000


class Reason(StrEnum):
    """The machine's word for it."""

    ENDED = "ended"
    RUNNING = "running"
    TASK_PAUSED = "task_paused"
    WAITING = "waiting"
    NOT_DUE = "not_due"
    TYPE_PAUSED = "type_paused"
    KEY_PAUSED = "key_paused"
    NO_OWNER = "no_owner"
    NO_WORKER = "no_worker"
    KEY_TAKEN = "key_taken"
    LIMIT_IN_FLIGHT = "limit_in_flight"
    LIMIT_STARTS = "limit_starts"
    AHEAD = "ahead"
    NEXT = "next"
    ON_KAFKA = "on_kafka"
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Ahead:
    """How many of its type are released before a task.

    Attributes:
        tasks: so many.
        more: at least so many: not all were counted.
        about: keys take turns, and whose turn it is was not asked.
    """

    tasks: int
    more: bool = False
    about: bool = False

    def __str__(self) -> str:
        number = f"{self.tasks:,} task{'' if self.tasks == 1 else 's'}"
        if self.more:
            return f"more than {number}"
        return f"about {number}" if self.about else number


@dataclass(frozen=True, slots=True)
class Readers:
    """A ready topic and the workers who read it.

    Attributes:
        workers: members of their group that have partitions; None while these are being given out.
        lag: records that nobody has taken.
    """

    workers: int | None
    lag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one task and of what may hold it.

    Attributes:
        now: the moment of which all else tells.
        state: where it is.
        attempt: which run of its stage.
        since: when its row was changed last.
        due_at: not before this moment.
        pausing: while running: to be paused at the end of its stage.
        worker: while running: who has it.
        lease_s: while running: how long its worker may be silent.
        type_paused: its type is.
        owner: the task-sync that releases its type; None is nobody.
        noted: it was released, and its owner has not noted yet that Kafka has it.
        key: of the task, where its type goes by keys.
        key_paused: its key is.
        key_in_flight: tasks of its key that are in flight.
        key_limit: most of them; None is any number.
        in_flight: tasks of its type that are in flight, where that is limited.
        max_in_flight: most of them; None is any number.
        starts_per_s: most that start a second; None is any number.
        ahead: those before it, while it is ready.
        readers: of its ready topic; None when Kafka does not tell.
    """

    now: datetime
    state: State
    since: datetime
    attempt: int = 0
    due_at: datetime | None = None
    pausing: bool = False
    worker: str | None = None
    lease_s: float | None = None
    type_paused: bool = False
    owner: str | None = None
    noted: bool = False
    key: str | None = None
    key_paused: bool = False
    key_in_flight: int | None = None
    key_limit: int | None = None
    in_flight: int | None = None
    max_in_flight: int | None = None
    starts_per_s: float | None = None
    ahead: Ahead | None = None
    readers: Readers | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """The answer.

    Attributes:
        reason: the word.
        sentence: for people.
        figures: what it goes by, by name: see `Figures` of the API's description.
    """

    reason: Reason
    sentence: str
    figures: Mapping[str, Any]


def why(facts: Facts) -> Why:
    """The one answer."""
    if facts.state in FINAL:
        return Why(Reason.ENDED, f"it has ended: {facts.state}", {"since": facts.since})
    if facts.state is State.RUNNING:
        return _running(facts)
    if facts.state is State.PAUSED:
        left_s = _left_s(facts)
        delay = f"; {left_s:,.0f} s of its delay are left" if left_s > 0 else ""
        figures = {"since": facts.since} | ({"due_at": facts.due_at} if left_s > 0 else {})
        return Why(Reason.TASK_PAUSED, f"it is paused until somebody resumes it{delay}", figures)
    if facts.state is State.WAITING:
        return Why(Reason.WAITING, "it waits for a child or an event", {"since": facts.since})
    if facts.state is State.SCHEDULED:
        return _scheduled(facts)
    figures = _figures(facts)
    if facts.state is State.QUEUED:
        reason, sentence = _queued(facts)
    else:
        reason, sentence = _ready(facts)
    return Why(reason, sentence, figures)


def _running(facts: Facts) -> Why:
    # What is known of a beat without a claim has no name.
    who = facts.worker or "a worker"
    pausing = "; it is to be paused when its stage ends" if facts.pausing else ""
    figures = {"since": facts.since, "worker": facts.worker, "lease_s": facts.lease_s}
    return Why(
        Reason.RUNNING,
        f"it is running on {who}{pausing}",
        {name: value for name, value in figures.items() if value is not None},
    )


def _scheduled(facts: Facts) -> Why:
    left_s = _left_s(facts)
    figures: dict[str, Any] = {"since": facts.since, "attempt": facts.attempt}
    if facts.due_at is not None:
        figures |= {"due_at": facts.due_at, "due_in_s": left_s}
    if left_s > 0:
        what = f"it is tried again (attempt {facts.attempt})" if facts.attempt else "it is due"
        return Why(Reason.NOT_DUE, f"{what} in {left_s:,.1f} s", figures)
    if facts.owner is None:
        sentence = "it is due, and no task-sync has its type: is one running?"
        return Why(Reason.NO_OWNER, sentence, figures)
    return Why(Reason.NEXT, "it is due and about to become ready", {**figures, "owner": facts.owner})


def _queued(facts: Facts) -> tuple[Reason, str]:
    readers = facts.readers
    if facts.noted and facts.owner is None:
        told = "who released it has gone, perhaps before Kafka had it, and no task-sync has its type: is one running?"
        return Reason.NO_OWNER, told
    if readers is None:
        return (
            Reason.ON_KAFKA,
            "it was released to its ready topic; Kafka does not tell what is before it there",
        )
    if readers.lag and readers.workers == 0:
        return (
            Reason.NO_WORKER,
            f"it was released, and no worker reads its ready topic ({_records(readers)} there)",
        )
    if readers.lag:
        return Reason.ON_KAFKA, f"it was released; before it wait at most {_records(readers)} for workers"
    if facts.noted:
        return Reason.ON_KAFKA, "it was released, and its record is on its way to Kafka"
    taken = "a worker has taken it from its ready topic, and runs it or has it in hand"
    return Reason.TAKEN, f"{taken}; had its record been lost, task-sync would find that at its next recheck"


def _ready(facts: Facts) -> tuple[Reason, str]:
    held = _paused(facts) or _absent(facts) or _limited(facts)
    if held is not None:
        return held
    ahead = facts.ahead
    if ahead is not None and ahead.tasks:
        verb = "is" if ahead.tasks == 1 and not ahead.more else "are"
        return Reason.AHEAD, f"{ahead} of its type {verb} released before it"
    waits = f", once workers take some of the {_records(facts.readers)} before it" if _waits(facts) else ""
    return Reason.NEXT, f"it is the next of its type to be released{waits}"


def _paused(facts: Facts) -> tuple[Reason, str] | None:
    if facts.type_paused:
        return Reason.TYPE_PAUSED, "its type is paused"
    if facts.key_paused:
        return Reason.KEY_PAUSED, f"its key, {facts.key}, is paused"
    return None


def _absent(facts: Facts) -> tuple[Reason, str] | None:
    if facts.owner is None:
        return Reason.NO_OWNER, "no task-sync has its type, so nothing of it is released: is one running?"
    if facts.readers is not None and facts.readers.workers == 0:
        there = f" ({_records(facts.readers)} there)" if facts.readers.lag else ""
        return Reason.NO_WORKER, f"no worker reads the ready topic of its type{there}"
    return None


def _limited(facts: Facts) -> tuple[Reason, str] | None:
    behind = f", and {facts.ahead} before it" if facts.ahead is not None and facts.ahead.tasks else ""
    if facts.key_limit is not None and (facts.key_in_flight or 0) >= facts.key_limit:
        of = f"{facts.key_in_flight:,} tasks of its key, {facts.key}, are in flight, of {facts.key_limit:,} that may be"
        return Reason.KEY_TAKEN, of + behind
    if facts.max_in_flight is not None and (facts.in_flight or 0) >= facts.max_in_flight:
        of = f"{facts.in_flight:,} tasks of its type are in flight, of {facts.max_in_flight:,} that may be"
        return Reason.LIMIT_IN_FLIGHT, of + behind
    rate = facts.starts_per_s
    # With a second's starts untaken on its topic it is the workers who are slow.
    if rate is not None and (facts.readers is None or facts.readers.lag < max(1, ceil(rate))):
        return Reason.LIMIT_STARTS, f"its type may start {rate:g} tasks a second{behind}"
    return None


def _figures(facts: Facts) -> dict[str, Any]:
    readers, ahead = facts.readers, facts.ahead
    known = {
        "since": facts.since,
        "ahead": ahead.tasks if ahead is not None else None,
        # Said when it is so.
        "ahead_more": (ahead is not None and ahead.more) or None,
        "ahead_about": (ahead is not None and ahead.about) or None,
        "in_flight": facts.in_flight,
        "max_in_flight": facts.max_in_flight,
        "starts_per_s": facts.starts_per_s,
        "key": facts.key,
        "key_in_flight": facts.key_in_flight,
        "key_limit": facts.key_limit,
        "owner": facts.owner,
        "workers": readers.workers if readers is not None else None,
        "lag": readers.lag if readers is not None else None,
    }
    return {name: value for name, value in known.items() if value is not None}


def _left_s(facts: Facts) -> float:
    return (facts.due_at - facts.now).total_seconds() if facts.due_at is not None else 0.0


def _waits(facts: Facts) -> bool:
    return facts.readers is not None and facts.readers.lag > 0


def _records(readers: Readers | None) -> str:
    lag = readers.lag if readers is not None else 0
    return f"{lag:,} record{'' if lag == 1 else 's'}"
