"""The rows of a pipeline's tasks, and their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.contracts.result import Failure
from penstock.core.attempt import AttemptId
from penstock.core.completion import SUSPENDING, Fence, Outcome
from penstock.core.task import Priority, State
from penstock.postgres.columns import SHOWN
from penstock.postgres.ending import Ending
from penstock.postgres.tasks import encode_ref
from penstock.postgres.timeline import KEPT_INPUTS, SAME_INPUT
from penstock.testing.database import Row


@dataclass(frozen=True, slots=True)
class FlowPlace:
    """The place of a task in a flow.

    Attributes:
        flow_id: the flow.
        root_id: the root of the flow's family.
        priority: of the root.
        node: the node.
        generation: in which the node started the task.
        item: of a map; None for another node.
        since: when the root started.
    """

    flow_id: int
    root_id: int
    priority: int
    node: str
    generation: int
    item: int | None
    since: datetime


@dataclass(slots=True, kw_only=True)
class TaskRow:
    """A task."""

    id: int
    type: str
    state: State
    stage: str
    priority: Priority
    context: Context
    created_at: datetime
    updated_at: datetime
    step: int = 0
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    unhandled_s: float = 0.0
    result: Context | None = None
    error: Failure | None = None
    key: str | None = None
    idempotency_key: str | None = None
    context_digest: bytes | None = None
    events: str = "final"
    labels: Mapping[str, str] = field(default_factory=dict)
    due_at: datetime | None = None
    finished_at: datetime | None = None
    worker: str | None = None
    pausing: bool = False
    queued_at: datetime | None = None
    started_at: datetime | None = None
    rerun_of: int | None = None
    # As in the column.
    callbacks: Sequence[str] | None = None
    flow: FlowPlace | None = None
    attempts: list[Row] = field(default_factory=list)

    @property
    def attempt_id(self) -> AttemptId:
        """The current attempt."""
        return AttemptId(self.id, self.step, self.attempt)

    @property
    def fence(self) -> Fence:
        """The current attempt, with its stage."""
        return Fence(self.id, self.step, self.stage, self.attempt)

    @property
    def flow_priority(self) -> int | None:
        """The priority of the root flow; None for a task without a flow."""
        return None if self.flow is None else self.flow.priority

    @property
    def flow_root_id(self) -> int | None:
        """The root flow; None for a task without a flow."""
        return None if self.flow is None else self.flow.root_id


def columns_of(row: TaskRow) -> Row:
    """The columns of a task of which its events and its document are made, without its contexts."""
    place = row.flow
    flow: dict[str, Any] = {}
    if place is not None:
        flow = {"id": place.flow_id, "node": place.node, "generation": place.generation, "item": place.item}
    return Row(
        {name: getattr(row, name) for name in SHOWN},
        priority=row.priority,
        key=row.key,
        labels=orjson.dumps(dict(row.labels)).decode() if row.labels else None,
        callbacks=row.callbacks,
        error=encode_error(row.error),
        flow=orjson.dumps(flow).decode() if flow else None,
        **{f"flow_{name}": value for name, value in flow.items()},
        queued_at=row.queued_at,
        started_at=row.started_at,
        attempts=row.attempts,
        # A pipeline calls nothing.
        callbacks_owed=[],
    )


def attempt_row(row: TaskRow, ending: Ending, started_at: datetime | None, finished_at: datetime) -> Row:
    """The history of an attempt, from the row of its task before its end."""
    ends_stage = ending.outcome is Outcome.NEXT or ending.outcome in SUSPENDING
    leaves = ends_stage and ending.fence.step < KEPT_INPUTS
    replaces = leaves and (ending.outcome is not Outcome.NEXT or ending.context is not None)
    return Row(
        step=ending.fence.step,
        attempt=ending.fence.attempt,
        stage=ending.fence.stage,
        outcome=ending.outcome,
        worker=ending.worker,
        error=encode_error(ending.error),
        queued_at=row.queued_at,
        started_at=row.started_at if ending.outcome is Outcome.EXPIRED else started_at,
        finished_at=finished_at,
        input_type=row.context.content_type.value if replaces else SAME_INPUT if leaves else None,
        input=row.context.data if replaces else None,
        input_ref=encode_ref(row.context.ref) if replaces else None,
    )


def result_columns(result: Context | None) -> dict[str, Any]:
    """The columns of a result; those of none are null."""
    if result is None:
        return {}
    return {
        "result_type": result.content_type.value,
        "result": result.data,
        "result_ref": encode_ref(result.ref),
    }


def encode_error(error: Failure | None) -> str | None:
    """An error as the JSON text of its column."""
    return orjson.dumps(error.to_wire()).decode() if error else None
