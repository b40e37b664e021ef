"""The values that the client accepts and returns, decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from penstock.client.arguments import encode_moment, priority_name
from penstock.client.checked import require_fields
from penstock.contracts.context import Context
from penstock.contracts.task_fields import TaskFields
from penstock.core.task import FINAL, Priority, State
from penstock.errors import Faults, Invalid


def filter_wire(wanted: Any) -> dict[str, Any]:
    """The JSON object of a filter, without attributes that are not set.

    Args:
        wanted: a dataclass whose attributes have the names of the object's members.

    Raises:
        InvalidRecord: an attribute has the wrong type; `pointer` is the attribute.
    """
    require_fields(wanted)
    wire: dict[str, Any] = {}
    for each in fields(wanted):
        value = getattr(wanted, each.name)
        if isinstance(value, datetime):
            value = encode_moment(value, each.name)
        elif isinstance(value, Mapping):
            value = dict(value)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            value = list(value)
        if value not in (None, [], {}):
            wire[each.name] = value
    return wire


def submitted_of(
    wire: Mapping[str, Any], read_result: Callable[..., Any], *, generated: bool
) -> Submitted | None:
    """The task of an entry in the answer to a batch; None when the entry is refused.

    Args:
        wire: the entry.
        read_result: see `Submitted`.
        generated: the client generated the idempotency key. No other call uses it, so this call
            created the task even when its request was repeated.
    """
    if "id" not in wire:
        return None
    return Submitted(wire["id"], created=generated or wire["created"], read_result=read_result)


class SubmissionsRefused(Faults):
    """Some of many submissions are refused; all others are submitted.

    Attributes:
        faults: the faults; a pointer begins with the place of its submission.
        submitted: the task of each submission in their order, None where it is refused.
    """

    def __init__(self, faults: Sequence[Invalid], submitted: Sequence[Submitted | None]) -> None:
        super().__init__(faults)
        self.submitted = submitted

    @staticmethod
    def of(refusals: Sequence[Invalid], submitted: Sequence[Submitted | None]) -> Invalid:
        """The error of several requests; the only refusal itself when nothing is submitted."""
        if len(refusals) == 1 and not any(submitted):
            return refusals[0]
        return SubmissionsRefused([fault for each in refusals for fault in each.faults], submitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(TaskFields):
    """A task to submit: the fields of `TaskFields`, and those that are converted.

    Attributes:
        context: the input of the first stage: any JSON value, bytes, or a `Context` for text and
            URLs.
        priority: order of release within the type.
        run_at: the earliest moment of release; a naive moment is local time.
        callbacks: targets of the task's callbacks: URLs, or objects with `url` and optionally
            `events`, `headers`, `format` and `ordered`, as in `submitted.schema.json`. None is the
            type's list; an empty list means no callbacks.
    """

    context: Any = None
    priority: Priority | str = Priority.MEDIUM
    run_at: datetime | None = None
    # Not in the repr, because headers are secrets.
    callbacks: Sequence[str | Mapping[str, Any]] | None = field(default=None, repr=False)

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of `submitted.schema.json`.

        Raises:
            InvalidRecord: the context is not JSON, or an argument has the wrong type.
        """
        require_fields(self)
        wire: dict[str, Any] = {**self.wire_fields(), **Context.encode(self.context).to_wire()}
        if self.priority is not Priority.MEDIUM:
            wire["priority"] = priority_name(self.priority)
        if self.run_at is not None:
            wire["run_at"] = encode_moment(self.run_at, "run_at")
        if self.callbacks is not None:
            wire["callbacks"] = list(self.callbacks)
        return wire


@dataclass(frozen=True, slots=True)
class Submitted:
    """The task of a submission.

    Attributes:
        id: task id.
        created: False when an earlier submission with the same idempotency key created the task.
        read_result: returns the result by id, as `result` of the client that submitted the task.
    """

    id: int
    created: bool
    read_result: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def result(self, *, timeout_s: float | None = None) -> Any:
        """The result of the task, as `result` of the client: of `Client` it is awaited.

        Raises:
            NotSucceeded: the task has ended in another state.
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        assert self.read_result is not None, "no client submitted it"
        return self.read_result(self.id, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The outcome of a cancellation; each id is in one of the three lists.

    Attributes:
        cancelled: ids of the tasks that this call cancelled.
        unchanged: ids of the tasks that had ended before.
        unknown: ids without a task.
    """

    cancelled: Sequence[int]
    unchanged: Sequence[int]
    unknown: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """A filter of tasks: a task must match all attributes that are set; set at least one.

    Attributes:
        ids: task ids; at most 10,000.
        type: task type.
        stage: current stage, or the last one.
        key: concurrency key.
        states: one of these states; by default every state in which the verb applies.
        labels: labels that the task has, with these values.
        priorities: one of these priorities.
        created_since: created at this moment or later; a naive moment is local time, here and
            below.
        created_until: created before this moment.
        finished_since: ended at this moment or later.
        finished_until: ended before this moment.
        error: part of the text "kind: message" of the task's error, in upper or lower case.
    """

    ids: Sequence[int] = ()
    type: str | None = None
    stage: str | None = None
    key: str | None = None
    states: Sequence[State | str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    priorities: Sequence[Priority | str] = ()
    created_since: datetime | None = None
    created_until: datetime | None = None
    finished_since: datetime | None = None
    finished_until: datetime | None = None
    error: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """The JSON object `TaskFilter` of the API's description."""
        wire = filter_wire(self)
        if "priorities" in wire:
            wire["priorities"] = [priority_name(each, "priorities") for each in wire["priorities"]]
        return wire


@dataclass(frozen=True, slots=True)
class Operated:
    """The result of an operation or of its dry run.

    Attributes:
        id: id of the operation, also in the audit; None for a dry run.
        state: running, done, stopped or failed; None for a dry run.
        count: number of tasks that the operation has changed, or would change.
        found_in: number of these tasks by their state before the change.
        complete: False when a dry run stopped counting at its limit.
        examples: the first five tasks of a dry run, as `TaskSummary` documents of the API's
            description.
        error: why the operation failed.
    """

    id: str | None
    state: str | None
    count: int
    found_in: Mapping[str, int]
    complete: bool
    examples: Sequence[Mapping[str, Any]]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay of callbacks or of its dry run.

    Attributes:
        count: number of callbacks that were replayed, or would be.
        held: number of these callbacks that wait because their target is disabled.
        disabled: URLs of such targets; at most five.
        complete: False when a dry run stopped counting at its limit.
        examples: the first five callbacks, as `CallbackRow` documents of the API's description.
    """

    count: int
    held: int
    disabled: Sequence[str]
    complete: bool
    examples: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """How far the current attempt of a task is, by the last report of its handler.

    Attributes:
        fraction: the part that is done, from 0 to 1; None when the handler does not know it.
        message: a line for people; may be empty.
        reported_at: when the platform received the report.
    """

    fraction: float | None
    message: str
    reported_at: datetime

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> TaskProgress:
        """Decodes a document of the gateway."""
        return cls(raw["fraction"], raw["message"], datetime.fromisoformat(raw["reported_at"]))


@dataclass(frozen=True, slots=True)
class Task:
    """A task at the moment of the gateway's answer.

    Attributes:
        id: task id.
        type: task type.
        state: state of the task.
        stage: current stage, or the last one.
        attempt: number of the attempt of this stage; the first is 0.
        priority: order of release within the type.
        labels: labels of the submission.
        context: input of the stage, decoded; None in lists.
        result: result of the last stage, decoded; None before the task has succeeded, and in lists.
        error: kind, message and optionally traceback of the failure; None without one.
        raw: the whole document of the gateway.
    """

    id: int
    type: str
    state: State
    stage: str
    attempt: int
    priority: Priority
    labels: Mapping[str, str]
    context: Any
    result: Any
    error: Mapping[str, str] | None
    raw: Mapping[str, Any]

    @property
    def ended(self) -> bool:
        """Whether the state is final: succeeded, failed, cancelled or quarantined."""
        return self.state in FINAL

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """The attempts that have ended, in order; empty in lists."""
        return self.raw.get("attempts") or ()

    @property
    def progress(self) -> TaskProgress | None:
        """How far the current attempt is; None without a report, and once it is over."""
        raw = self.raw.get("progress")
        return TaskProgress.from_wire(raw) if raw else None

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> Task:
        """Decodes a document of the gateway."""
        return cls(
            id=raw["id"],
            type=raw["type"],
            state=State(raw["state"]),
            stage=raw["stage"],
            attempt=raw["attempt"],
            priority=Priority[raw["priority"]],
            labels=raw["labels"],
            context=_decode(raw, "context", raw.get("content_type")),
            result=_decode(raw, "result", raw.get("result_type")),
            error=raw["error"],
            raw=raw,
        )


def _decode(raw: Mapping[str, Any], name: str, content_type: str | None) -> Any:
    if content_type is None or name not in raw:
        return None
    context = Context.from_wire({"content_type": content_type, name: raw[name]}, name)
    return context.decode() if context else None
