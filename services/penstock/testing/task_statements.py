"""The answers to the statements by which flows change tasks, and to those of the outbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, cast

from penstock.contracts.context import ContentType, Context
from penstock.contracts.submission import Submission
from penstock.core.task import Priority
from penstock.postgres.tasks import context_of
from penstock.testing.database import Row, answers, rows_of
from penstock.testing.flow_tables import Statements
from penstock.testing.task_rows import FlowPlace, columns_of


class TaskStatements(Statements):
    """Answers statements about tasks."""

    @answers("flows.insert_tasks")
    def _insert(self, **columns: Any) -> None:
        for row in rows_of(columns):
            place = FlowPlace(
                row["flow_id"],
                row["root_id"],
                row["flow_priority"],
                row["node"],
                row["generation"] or 0,
                row["item"],
                self._since(row["root_id"]),
            )
            if any(task.flow == place for task in self._tasks.of_flow(place.flow_id, place.node)):
                continue
            submission = Submission(
                type=row["type"],
                stage=row["stage"],
                context=cast("Context", context_of(row)),
                priority=Priority(row["priority"]),
                key=row["key"],
            )
            self._tasks.insert(submission, place)

    def _since(self, root_id: int) -> datetime:
        """When the root of a family was created; without a flow it is a waiting task."""
        root = self._rows.flows.get(root_id)
        found: datetime = self._tasks.get(root_id).created_at if root is None else root["created_at"]
        return found

    @answers("flows.wake")
    def _wake(self, **columns: Any) -> Iterator[Row]:
        for row in rows_of(columns):
            row["content_type"] = ContentType.JSON
            context = cast("Context", context_of(row))
            if self._tasks.wake(row["id"], row["step"], row["stage"], context):
                yield columns_of(self._tasks.get(row["id"]))

    @answers("tasks.cancel")
    def _cancel_tasks(self, ids: Sequence[int]) -> list[Row]:
        return [columns_of(row) for row in self._rows.cancel(ids)]

    @answers("outbox.enqueue_events")
    def _enqueue_events(self, _keys: Any, _records: Any) -> list[Row]:
        return [Row(id=0)]

    @answers("outbox.enqueue_callbacks")
    def _enqueue_callbacks(self, **_columns: Any) -> None:
        """They are in the entry that `enqueue` returns."""
