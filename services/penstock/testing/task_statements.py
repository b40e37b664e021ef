"""The answers to the statements by which flows change tasks, and to those of the outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import orjson

from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.core.task import FINAL, Priority
from penstock.testing.database import Row, answers, rows_of
from penstock.testing.flow_tables import FlowTables
from penstock.testing.tables import Tasks
from penstock.testing.task_rows import FlowPlace, TaskRow


class TaskStatements:
    """Answers statements about tasks.

    Args:
        tasks: the tasks of the pipeline.
        flows: the rows of flows.
        cancel: cancels tasks and their handlers; returns those that were not final.
    """

    def __init__(
        self, tasks: Tasks, flows: FlowTables, cancel: Callable[[Sequence[int]], list[TaskRow]]
    ) -> None:
        self._tasks = tasks
        self._flows = flows
        self._cancel = cancel

    @answers("flows.insert_tasks")
    def _insert(self, *columns: Any) -> None:
        for row in rows_of("flows.insert_tasks", *columns):
            place = FlowPlace(
                row["flow_id"],
                row["root_id"],
                row["flow_priority"],
                row["node"],
                row["generation"] or 0,
                row["item"],
                self._since(row["root_id"]),
            )
            ref = row["context_ref"]
            context = Context(
                ContentType(row["content_type"]),
                data=row["context"],
                ref=ObjectRef.from_wire(orjson.loads(ref)) if ref else None,
            )
            priority = Priority(row["priority"])
            self._tasks.insert_in_flow(place, row["type"], row["stage"], context, priority, row["key"])

    def _since(self, root_id: int) -> datetime:
        """When the root of a family was created; without a flow it is a waiting task."""
        root = self._flows.flows.get(root_id)
        found: datetime = self._tasks.get(root_id).created_at if root is None else root["created_at"]
        return found

    @answers("flows.wake")
    def _wake(self, *columns: Any) -> Iterator[Row]:
        for row in rows_of("flows.wake", *columns):
            ref = row["context_ref"]
            context = Context(
                ContentType.JSON,
                data=row["context"],
                ref=ObjectRef.from_wire(orjson.loads(ref)) if ref else None,
            )
            if self._tasks.wake(row["id"], row["step"], row["stage"], context):
                yield columns_of(self._tasks.get(row["id"]))

    @answers("tasks.cancel")
    def _cancel_tasks(self, ids: Sequence[int]) -> list[Row]:
        return [columns_of(row) for row in self._cancel(ids)]

    @answers("outbox.enqueue_events")
    def _enqueue_events(self, _keys: Any, _records: Any) -> list[Row]:
        return [Row(id=0)]

    @answers("outbox.enqueue_callbacks")
    def _enqueue_callbacks(self, *_columns: Any) -> None:
        """They are in the entry that `enqueue` returns."""


def columns_of(row: TaskRow) -> Row:
    """The columns of a task of which its events are made."""
    place = row.flow
    flow = None
    if place is not None:
        flow = {"id": place.flow_id, "node": place.node, "generation": place.generation, "item": place.item}
    return Row(
        id=row.id,
        type=row.type,
        state=row.state.value,
        stage=row.stage,
        step=row.step,
        attempt=row.attempt,
        idempotency_key=row.idempotency_key,
        labels=orjson.dumps(dict(row.labels)).decode() if row.labels else None,
        callbacks=row.callbacks,
        events=row.events,
        updated_at=row.updated_at,
        traceparent=None,
        flow=orjson.dumps(flow).decode() if flow else None,
    )


def has_events(row: TaskRow) -> bool:
    """Whether the transition of a task may have events or callbacks."""
    return row.events == "all" or row.state in FINAL or bool(row.callbacks)
