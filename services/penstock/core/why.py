"""Why a task is waiting (S8): one answer, decided from the facts about the task. Pure.

Several reasons can apply; the answer is the reason that has to end first. For a ready task the
order is: pauses, missing services, limits (its key's before its type's), tasks ahead of it. A
queued task waits for workers only. One module, because the order of the reasons is the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from math import ceil
from typing import Any, NamedTuple

from penstock.core.attempt import AttemptId
from penstock.core.task import FINAL, Priority, State

# Tasks ahead are counted up to this number.
COUNTED = 10_000


class WaitReason(StrEnum):
    """The reason, as the API names it."""

    ENDED = "ended"
    RUNNING = "running"
    TASK_PAUSED = "task_paused"
    WAITING = "waiting"
    NOT_DUE = "not_due"
    NO_HANDLER = "no_handler"
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
    """How many tasks of its type are released before a task.

    Attributes:
        tasks: the number.
        more: the number is a lower bound, because the count stopped.
        about: the number is an estimate, because the position of the round robin among keys is not
            known, or which keys a release reads together.
    """

    tasks: int
    more: bool = False
    about: bool = False

    def __str__(self) -> str:
        number = f"{self.tasks:,} task{'' if self.tasks == 1 else 's'}"
        if self.more:
            return f"more than {number}"
        return f"about {number}" if self.about else number


class RecordPosition(NamedTuple):
    """The position of a record that no worker has taken.

    Attributes:
        partition: of the ready topic.
        worker: the consumer that has the partition; None while there is none.
        before: records before it on its partition that were not taken either.
    """

    partition: int
    worker: str | None
    before: int


class FlowPriority(NamedTuple):
    """The flow whose priority orders the release of a task.

    Attributes:
        id: the flow that the task belongs to.
        root_id: the flow at the top, or the task without a flow that waits for this flow.
        priority: of that one.
        root_is_task: whether it is a task.
    """

    id: int
    root_id: int
    priority: Priority
    root_is_task: bool = False

    def __str__(self) -> str:
        return f"{'task' if self.root_is_task else 'flow'} {self.root_id} ({self.priority.name})"


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The consumer group of a type's workers, and its lag on the ready topic.

    Attributes:
        workers: members with partitions; None during a rebalance.
        lag: records that no worker has taken.
        positions: where the records of attempts wait, when they were read.
        stages: that the workers have handlers for; None when one of them does not say.
    """

    workers: int | None
    lag: int
    positions: Mapping[AttemptId, RecordPosition] = field(default_factory=dict)
    stages: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about one task, at one moment.

    Attributes:
        now: the moment.
        state: of the task.
        stage: its current stage.
        attempt: the number of its current attempt.
        since: when its row last changed.
        due_at: when it is due.
        error: kind and message of its last error.
        traceback: the end of the traceback of that error.
        log: path of the log of the last attempt that ended with an error.
        unhandled: why a worker handed its last attempt back, when it had no handler for the stage.
        unhandled_s: seconds for which such workers have delayed it.
        no_handler_s: the seconds of such delays after which it fails; None is without end.
        pausing: while running: it is paused at the end of its stage.
        worker: while running: the worker that has it.
        lease_s: while running: the length of its lease.
        waits_for: while waiting: the flow that wakes it.
        type_paused: its type is paused.
        owner: the task-sync replica that owns its type; None without an owner.
        noted: it was released, and the batch note is not deleted yet.
        concurrency_key: of the task, when its type is released by key.
        key_paused: its key is paused.
        key_in_flight: tasks of its key in flight.
        key_limit: most tasks of its key in flight; None is no limit.
        in_flight: tasks of its type in flight, when that is limited.
        max_in_flight: most tasks of its type in flight; None is no limit.
        starts_per_s: most starts of its type a second; None is no limit.
        ahead: tasks before it, while it is ready.
        group: the workers' consumer group; None when Kafka did not answer.
        position: while queued: where its record waits; None when that is unknown.
        unrun: how many of its last attempts of this stage ended without a run.
        flow: that it belongs to; None for a task without a flow.
    """

    now: datetime
    state: State
    since: datetime
    stage: str = ""
    attempt: int = 0
    due_at: datetime | None = None
    error: str | None = None
    traceback: str | None = None
    log: str | None = None
    unhandled: str | None = None
    unhandled_s: float = 0.0
    no_handler_s: float | None = None
    pausing: bool = False
    worker: str | None = None
    lease_s: float | None = None
    waits_for: int | None = None
    type_paused: bool = False
    owner: str | None = None
    noted: bool = False
    concurrency_key: str | None = None
    key_paused: bool = False
    key_in_flight: int | None = None
    key_limit: int | None = None
    in_flight: int | None = None
    max_in_flight: int | None = None
    starts_per_s: float | None = None
    ahead: Ahead | None = None
    group: GroupLag | None = None
    position: RecordPosition | None = None
    unrun: int = 0
    flow: FlowPriority | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """The answer.

    Attributes:
        reason: for programs.
        sentence: for people.
        figures: the facts behind it, by name; see `Figures` in the API's description.
    """

    reason: WaitReason
    sentence: str
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskWhy:
    """The answer about one task.

    Attributes:
        id: its id.
        type: name of its type.
        state: its state.
        answer: why it waits, or what it does.
    """

    id: int
    type: str
    state: State
    answer: Why


def why(facts: Facts) -> Why:
    """Decides the answer."""
    if facts.state in FINAL:
        return _ended(facts)
    if facts.state is State.RUNNING:
        return _running(facts)
    if facts.state is State.PAUSED:
        left_s = _until_due_s(facts)
        delay = f"; {left_s:,.0f} s of its delay are left" if left_s > 0 else ""
        figures = {"since": facts.since} | ({"due_at": facts.due_at} if left_s > 0 else {})
        return Why(WaitReason.TASK_PAUSED, f"it is paused until it is resumed{delay}", figures)
    if facts.state is State.WAITING:
        flow = facts.waits_for
        waited = "its children or an event" if flow is None else f"flow {flow}"
        known = {} if flow is None else {"waits_for": flow}
        return Why(WaitReason.WAITING, f"it waits for {waited}", {"since": facts.since, **known})
    if facts.state is State.SCHEDULED:
        return _scheduled(facts)
    figures = _figures(facts)
    if facts.state is State.QUEUED:
        reason, sentence = _queued(facts)
        # A worker that has taken it may have left the group.
        if reason is WaitReason.ON_KAFKA:
            reason, sentence = _unhandled(facts) or (reason, sentence)
    else:
        reason, sentence = _ready(facts)
    return Why(reason, sentence + _unrun(facts), figures)


def _ended(facts: Facts) -> Why:
    figures = {"since": facts.since}
    if facts.state not in (State.FAILED, State.QUARANTINED):
        return Why(WaitReason.ENDED, f"it has ended: {facts.state}", figures)
    sentence = f"it has ended: {facts.error or facts.state}"
    return Why(WaitReason.ENDED, sentence, {**figures, **_failure(facts)})


def _failure(facts: Facts) -> dict[str, Any]:
    """The figures about the last attempt that failed."""
    figures = {"traceback": facts.traceback, "log": facts.log}
    return {name: value for name, value in figures.items() if value is not None}


def _running(facts: Facts) -> Why:
    # A lease that was taken over from a heartbeat has no name of a worker.
    worker = facts.worker or "a worker"
    pausing = "; it is to be paused when its stage ends" if facts.pausing else ""
    figures = {"since": facts.since, "worker": facts.worker, "lease_s": facts.lease_s}
    return Why(
        WaitReason.RUNNING,
        f"it is running on {worker}{pausing}",
        {name: value for name, value in figures.items() if value is not None},
    )


def _scheduled(facts: Facts) -> Why:
    left_s = _until_due_s(facts)
    figures: dict[str, Any] = {"since": facts.since, "attempt": facts.attempt}
    # With attempt 0 the error is that of an earlier stage.
    if facts.attempt:
        figures |= _failure(facts)
    if facts.due_at is not None:
        figures |= {"due_at": facts.due_at, "due_in_s": left_s}
    if left_s > 0:
        event = f"it is tried again (attempt {facts.attempt})" if facts.attempt else "it is due"
        if facts.unhandled is not None:
            sentence = (
                f"the last worker that took it had no handler for its stage ({facts.unhandled}); "
                f"{event} in {left_s:,.1f} s"
            )
            if facts.no_handler_s is not None:
                sentence += (
                    f", and fails after {facts.no_handler_s:,.0f} s of such delays "
                    f"({facts.unhandled_s:,.0f} s so far)"
                )
            return Why(WaitReason.NO_HANDLER, sentence, figures)
        return Why(WaitReason.NOT_DUE, f"{event} in {left_s:,.1f} s", figures)
    if facts.owner is None:
        sentence = "it is due, and no task-sync owns its type: is task-sync running?"
        return Why(WaitReason.NO_OWNER, sentence, figures)
    return Why(WaitReason.NEXT, "it is due and about to become ready", {**figures, "owner": facts.owner})


def _queued(facts: Facts) -> tuple[WaitReason, str]:
    group = facts.group
    if facts.noted and facts.owner is None:
        return (
            WaitReason.NO_OWNER,
            "it was released, perhaps without a record on Kafka, and no task-sync owns its type: is task-sync running?",
        )
    if group is None:
        return (
            WaitReason.ON_KAFKA,
            "it was released to its ready topic; Kafka did not answer how many records are before it",
        )
    if group.lag and group.workers == 0:
        return (
            WaitReason.NO_WORKER,
            f"it was released, and no worker reads its ready topic ({_records(group)} there)",
        )
    if group.lag:
        before = f"there are at most {_records(group)} before it"
        return (
            WaitReason.ON_KAFKA,
            f"it was released; {_positioned(facts.position) if facts.position else before}",
        )
    if facts.noted:
        return WaitReason.ON_KAFKA, "it was released, and its record is on its way to Kafka"
    taken = "a worker has taken it from its ready topic, and runs it or has it in its backlog"
    return (
        WaitReason.TAKEN,
        f"{taken}; if its record were lost, task-sync would find that at its next recheck",
    )


def _positioned(position: RecordPosition) -> str:
    before = f"{position.before:,} record{'' if position.before == 1 else 's'} before it"
    if position.worker is None:
        return f"its record is on partition {position.partition}, which no worker has now, with {before}"
    return (
        f"its record waits on partition {position.partition} for worker {position.worker}, with {before}; "
        "if the worker stays busy while another has room, task-sync withdraws the record within seconds"
    )


def _unrun(facts: Facts) -> str:
    if not facts.unrun:
        return ""
    attempts = "1 earlier attempt" if facts.unrun == 1 else f"{facts.unrun} earlier attempts"
    return (
        f"; {attempts} of its stage did not run: task-sync withdrew the record from a busy worker, "
        "or the task was paused"
    )


def _ready(facts: Facts) -> tuple[WaitReason, str]:
    blocked = _paused(facts) or _service_missing(facts) or _limited(facts)
    if blocked is not None:
        return blocked
    ahead = facts.ahead
    if ahead is not None and ahead.tasks:
        verb = "is" if ahead.tasks == 1 and not ahead.more else "are"
        order = f", in the place of {facts.flow}" if facts.flow is not None else ""
        return WaitReason.AHEAD, f"{ahead} of its type {verb} released before it{order}"
    has_lag = facts.group is not None and facts.group.lag > 0
    condition = f", once workers take some of the {_records(facts.group)} before it" if has_lag else ""
    return WaitReason.NEXT, f"it is the next of its type to be released{condition}"


def _paused(facts: Facts) -> tuple[WaitReason, str] | None:
    if facts.type_paused:
        return WaitReason.TYPE_PAUSED, "its type is paused"
    if facts.key_paused:
        return WaitReason.KEY_PAUSED, f"its key, {facts.concurrency_key}, is paused"
    return None


def _service_missing(facts: Facts) -> tuple[WaitReason, str] | None:
    if facts.owner is None:
        return (
            WaitReason.NO_OWNER,
            "no task-sync owns its type, so no task of it is released: is task-sync running?",
        )
    if facts.group is not None and facts.group.workers == 0:
        records = f" ({_records(facts.group)} there)" if facts.group.lag else ""
        return WaitReason.NO_WORKER, f"no worker reads the ready topic of its type{records}"
    return _unhandled(facts)


def _unhandled(facts: Facts) -> tuple[WaitReason, str] | None:
    """The answer when workers read the topic, and none of them has a handler for the stage."""
    group = facts.group
    if group is None or not group.workers or group.stages is None or facts.stage in group.stages:
        return None
    sentence = f"no worker of its type that is connected has a handler for its stage {facts.stage!r}"
    return WaitReason.NO_HANDLER, f"{sentence}; they have: {', '.join(sorted(group.stages))}"


def _limited(facts: Facts) -> tuple[WaitReason, str] | None:
    behind = f", and {facts.ahead} before it" if facts.ahead is not None and facts.ahead.tasks else ""
    if facts.key_limit is not None and (facts.key_in_flight or 0) >= facts.key_limit:
        key = facts.concurrency_key
        in_flight = (
            f"{facts.key_in_flight:,} tasks of its key, {key}, are in flight, of at most {facts.key_limit:,}"
        )
        return WaitReason.KEY_TAKEN, in_flight + behind
    if facts.max_in_flight is not None and (facts.in_flight or 0) >= facts.max_in_flight:
        tasks = "task of its type is" if facts.in_flight == 1 else "tasks of its type are"
        in_flight = f"{facts.in_flight:,} {tasks} in flight, of at most {facts.max_in_flight:,}"
        return WaitReason.LIMIT_IN_FLIGHT, in_flight + behind
    rate = facts.starts_per_s
    # When one second of starts waits on the ready topic, the workers are the limit, and not the
    # rate.
    if rate is not None and (facts.group is None or facts.group.lag < max(1, ceil(rate))):
        return WaitReason.LIMIT_STARTS, f"its type may start {rate:g} tasks a second{behind}"
    return None


def _figures(facts: Facts) -> dict[str, Any]:
    group, ahead = facts.group, facts.ahead
    figures = {
        "since": facts.since,
        "ahead": ahead.tasks if ahead is not None else None,
        # Flags are left out when they are false.
        "ahead_more": (ahead is not None and ahead.more) or None,
        "ahead_about": (ahead is not None and ahead.about) or None,
        "in_flight": facts.in_flight,
        "max_in_flight": facts.max_in_flight,
        "starts_per_s": facts.starts_per_s,
        "key": facts.concurrency_key,
        "key_in_flight": facts.key_in_flight,
        "key_limit": facts.key_limit,
        "owner": facts.owner,
        "workers": group.workers if group is not None else None,
        "lag": group.lag if group is not None else None,
        "partition": facts.position.partition if facts.position is not None else None,
        "worker": facts.position.worker if facts.position is not None else None,
        "before": facts.position.before if facts.position is not None else None,
        "unrun": facts.unrun or None,
        "flow": facts.flow.id if facts.flow is not None else None,
        "flow_root": facts.flow.root_id if facts.flow is not None else None,
        "flow_priority": facts.flow.priority.name if facts.flow is not None else None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _until_due_s(facts: Facts) -> float:
    return (facts.due_at - facts.now).total_seconds() if facts.due_at is not None else 0.0


def _records(group: GroupLag | None) -> str:
    lag = group.lag if group is not None else 0
    return f"{lag:,} record{'' if lag == 1 else 's'}"
