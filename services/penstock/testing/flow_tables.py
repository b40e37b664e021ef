"""The rows of a pipeline's flows: of the tables `flow`, `flow_node`, and what belongs to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.core.flow.waiting import waiting_definition
from penstock.core.task import Priority, State
from penstock.postgres.ending import Ending
from penstock.postgres.tasks import encode_ref
from penstock.testing.clock import Clock
from penstock.testing.database import Row
from penstock.testing.tables import Tasks
from penstock.testing.task_rows import TaskRow, encode_error, result_columns

_FLOW = (
    *("id", "root_id", "parent_id", "parent_node", "parent_generation", "parent_item", "name", "version"),
    *("versions", "status", "generation", "paused", "stop", "unfinished", "live", "unsuccessful", "priority"),
    *("inputs", "inputs_ref", "output", "output_ref", "error", "idempotency_key", "events", "callbacks"),
    *("labels", "traceparent", "rerun_of", "schedule", "tick", "task_id", "task_step", "task_stage"),
    *("definition", "created_at", "updated_at", "finished_at", "backfill"),
)
_DEFAULTS: dict[str, Any] = {
    "status": "running",
    "generation": 0,
    "paused": False,
    "live": 0,
    "unsuccessful": 0,
    "priority": int(Priority.MEDIUM),
    "events": "final",
}
RUNNING = "running"


class FlowTables:
    """The tables of flows.

    Args:
        clock: of the pipeline.
        tasks: the tasks of the pipeline.
        cancel: cancels tasks and their handlers; returns those that were not final.

    Attributes:
        definitions: by name and version.
        flows: by id.
        inbox: what the owner has not applied yet.
        nodes: by flow and name.
        past_nodes: by flow, name and generation.
        limits: by flow, node, generation and kind.
        waits: by flow and node.
        events: by namespace and id, in the order of their arrival.
    """

    def __init__(self, clock: Clock, tasks: Tasks, cancel: Callable[[Sequence[int]], list[TaskRow]]) -> None:
        self.clock = clock
        self.tasks = tasks
        self.cancel = cancel
        self.definitions: dict[tuple[str, int], Row] = {}
        self.flows: dict[int, Row] = {}
        self.inbox: list[Row] = []
        self.nodes: dict[tuple[int, str], Row] = {}
        self.past_nodes: dict[tuple[int, str, int], Row] = {}
        self.limits: dict[tuple[int, str, int, str], Row] = {}
        self.waits: dict[tuple[int, str], Row] = {}
        self.events: dict[tuple[str, str], Row] = {}

    def note(self, **columns: Any) -> None:
        """Adds a row to the inbox."""
        self.inbox.append(Row(columns))

    def insert_flow(self, **columns: Any) -> Row:
        """Adds a flow."""
        now = self.clock.now
        given = {name: value for name, value in columns.items() if value is not None}
        flow = Row(dict.fromkeys(_FLOW) | _DEFAULTS | given)
        flow |= {"id": self.tasks.next_id(), "created_at": now, "updated_at": now}
        flow["root_id"] = flow["root_id"] or flow["id"]
        self.flows[flow["id"]] = flow
        return flow

    def suspend(self, row: TaskRow, ending: Ending) -> None:
        """Adds the flow that a waiting task waits for (`flows.suspend`)."""
        definition = waiting_definition(ending.outcome, ending.terms or {})
        inputs = ending.context or Context.encode({})
        place = row.flow
        flow = self.insert_flow(
            root_id=row.id if place is None else place.root_id,
            name=row.type,
            version=0,
            definition=orjson.dumps(definition).decode(),
            unfinished=1,
            priority=int(row.priority) if place is None else place.priority,
            inputs=inputs.data,
            inputs_ref=encode_ref(inputs.ref),
            task_id=row.id,
            task_step=row.step,
            task_stage=ending.next_stage,
        )
        self.note(root_id=flow["root_id"], flow_id=flow["id"], kind="began")

    def end_task(self, row: TaskRow, before: State) -> None:
        """Reports the end of a task to its flow, and ends its children (trigger `task_ended`)."""
        place = row.flow
        if place is not None:
            self.note(
                root_id=place.root_id,
                flow_id=place.flow_id,
                kind="task",
                node=place.node,
                generation=place.generation,
                item=place.item,
                state=row.state.value,
                task_id=row.id,
                error=encode_error(row.error),
                **result_columns(row.result),
            )
        if before is State.WAITING:
            for flow in self.flows.values():
                if flow["task_id"] == row.id and flow["status"] == RUNNING:
                    self.note(root_id=flow["root_id"], flow_id=flow["id"], kind="cancel")

    def take_inbox(self) -> list[Row]:
        """Takes the rows of the inbox, without commands behind a recovery of their flow."""
        taken: list[Row] = []
        left: list[Row] = []
        recovering: set[int] = set()
        for row in self.inbox:
            if row["kind"] == "recover":
                recovering.add(row["flow_id"])
            waits = row["kind"] in ("pause", "resume", "cancel") and row["flow_id"] in recovering
            (left if waits else taken).append(row)
        self.inbox = left
        return taken

    def take_due(self) -> list[Row]:
        """Takes the limits that are due, in the order of their moments."""
        due = sorted(
            (limit for limit in self.limits.values() if limit["at"] <= self.clock.now),
            key=lambda limit: (limit["at"], limit["flow_id"], limit["node"]),
        )
        for limit in due:
            del self.limits[limit["flow_id"], limit["node"], limit["generation"], limit["kind"]]
        return due

    def next_due(self) -> datetime | None:
        """When the next limit is due."""
        return min((limit["at"] for limit in self.limits.values()), default=None)

    def children(self, flow_id: int, node: str | None) -> Iterator[Row]:
        """The child flows of a flow, or of one of its nodes, the latest generation of each last."""
        found = [
            flow
            for flow in self.flows.values()
            if flow["parent_id"] == flow_id and node in (None, flow["parent_node"])
        ]
        yield from sorted(found, key=lambda flow: flow["parent_generation"])


class Statements:
    """Answers statements.

    Args:
        rows: of flows.
    """

    def __init__(self, rows: FlowTables) -> None:
        self._rows = rows
        self._tasks = rows.tasks
        self._clock = rows.clock
