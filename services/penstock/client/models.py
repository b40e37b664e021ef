"""What the client takes and gives: plain values, decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.contracts.context import Context
from penstock.core.task import FINAL, Priority, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A task to be submitted.

    Attributes:
        type: name of a registered task type.
        context: what the first stage is given: any JSON value, bytes, or a `Context` for text and URLs.
        stage: where to begin; None is the type's first stage.
        priority: which goes first within the type.
        key: tenant or resource that it counts for in limits and turns of its type.
        idempotency_key: submitting the same type and idempotency key again returns the first task.
        run_at: not to be released before; a naive moment is the local time.
        callbacks: targets to be called at each subscribed transition: URLs, or objects with `url` and perhaps `events`,
            `headers`, `format` and `ordered` as in `submitted.schema.json`; None is the type's choice, an empty one none.
        events: which transitions are reported, "final" or "all"; None is the type's choice.
        labels: free names and values, for finding tasks again.
    """

    type: str
    context: Any = None
    stage: str | None = None
    priority: Priority | str = Priority.MEDIUM
    key: str | None = None
    idempotency_key: str | None = None
    run_at: datetime | None = None
    # Never in a repr: headers are secrets.
    callbacks: Sequence[str | Mapping[str, Any]] | None = field(default=None, repr=False)
    events: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of `submitted.schema.json`.

        Raises:
            InvalidRecord: the context is not JSON.
        """
        wire: dict[str, Any] = {"type": self.type, **Context.encode(self.context).to_wire()}
        if self.priority is not Priority.MEDIUM:
            wire["priority"] = priority_name(self.priority)
        if self.run_at is not None:
            wire["run_at"] = self.run_at.astimezone().isoformat()
        if self.callbacks is not None:
            wire["callbacks"] = list(self.callbacks)
        if self.labels:
            wire["labels"] = dict(self.labels)
        rest = {
            "stage": self.stage,
            "key": self.key,
            "idempotency_key": self.idempotency_key,
            "events": self.events,
        }
        return wire | {name: value for name, value in rest.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Submitted:
    """The task a submission became.

    Attributes:
        id: task id.
        created: False when an earlier submission with the same idempotency key had created it.
    """

    id: int
    created: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What became of a wish to cancel some tasks; each id is in one of the three.

    Attributes:
        cancelled: by this call.
        unchanged: had ended before.
        unknown: no task has these ids.
    """

    cancelled: Sequence[int]
    unchanged: Sequence[int]
    unknown: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks are meant; all that is given must match, and something is given.

    Attributes:
        ids: these; at most 10,000.
        type, stage: of this name.
        key: with this one.
        states: in one of these; by default in any in which the verb can change them.
        labels: with all of these.
        priorities: with one of these.
        created_since, created_until: created at or after the one and before the other; naive moments are the local time.
        finished_since, finished_until: likewise, of those that have ended.
        error: a part of "kind: message" of its error, in any case of letters.
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
        wire: dict[str, Any] = {
            "ids": list(self.ids),
            "type": self.type,
            "stage": self.stage,
            "key": self.key,
            "states": [str(state) for state in self.states],
            "labels": dict(self.labels),
            "priorities": [priority_name(one) for one in self.priorities],
            "error": self.error,
        }
        for name in ("created_since", "created_until", "finished_since", "finished_until"):
            moment: datetime | None = getattr(self, name)
            wire[name] = moment.astimezone().isoformat() if moment is not None else None
        return {name: value for name, value in wire.items() if value not in (None, [], {})}


def priority_name(priority: Priority | str) -> str:
    """A priority as it travels."""
    return priority.name if isinstance(priority, Priority) else priority


@dataclass(frozen=True, slots=True)
class Operated:
    """What an operation has done, or by a dry run would do.

    Attributes:
        id: name of the operation, under which the audit has it; None for a dry run.
        state: running, done, stopped or failed; None for a dry run.
        count: how many tasks it has changed, or would change.
        found_in: how many of them were in which state.
        complete: False when a dry run has stopped counting.
        examples: of a dry run the first five, as of `TaskSummary` in the API's description.
        error: why it failed.
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
    """What was replayed, or by a dry run would be.

    Attributes:
        count: how many callbacks.
        held: how many of them wait for a disabled target.
        disabled: such targets; five at most.
        complete: False when a dry run has stopped counting.
        examples: the first five, as of `CallbackRow` in the API's description.
    """

    count: int
    held: int
    disabled: Sequence[str]
    complete: bool
    examples: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """A task as it was when the gateway was asked.

    Attributes:
        id: task id.
        type: task type.
        state: where it is.
        stage: the stage it is in, or ended in.
        attempt: which run of that stage; 0 is the first.
        priority: order of release within its type.
        labels: as submitted.
        context: what its stage is given, decoded; None in lists.
        result: what its last stage returned, decoded; None before that and in lists.
        error: kind, message and perhaps traceback of its failure.
        raw: the whole document as the gateway sent it.
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
        """Whether nothing more will happen to it by itself."""
        return self.state in FINAL

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """Every attempt that ended, in order; empty in lists."""
        return self.raw.get("attempts") or ()

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> Task:
        """Reads the gateway's document."""
        return cls(
            id=raw["id"],
            type=raw["type"],
            state=State(raw["state"]),
            stage=raw["stage"],
            attempt=raw["attempt"],
            priority=Priority[raw["priority"]],
            labels=raw["labels"],
            context=_decoded(raw, "context", raw.get("content_type")),
            result=_decoded(raw, "result", raw.get("result_type")),
            error=raw["error"],
            raw=raw,
        )


def _decoded(raw: Mapping[str, Any], name: str, content_type: str | None) -> Any:
    if content_type is None or name not in raw:
        return None
    context = Context.from_wire({"content_type": content_type, name: raw[name]}, name)
    return context.decode() if context else None
