"""The rows of flows as their owner reads them, many flows in a statement.

Every function but `shards_with_inbox` and `next_due_s` runs in a transaction of its caller, inside
`penstock.postgres.connection.translated`. `penstock.postgres.flow_writes` writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg
import orjson

from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.core.flow.state import (
    EdgeState,
    FlowState,
    FlowStatus,
    Items,
    Limit,
    NodeState,
    NodeStatus,
    StopReason,
)
from penstock.postgres.queries import fetch
from penstock.postgres.session import Session
from penstock.postgres.tasks import context_of

# Families of flows are divided by the id of their root.
SHARDS = 64

NO_INPUTS = Context.encode({})


@dataclass(frozen=True, slots=True)
class ParentPlace:
    """The place of a child flow in its parent.

    Attributes:
        flow_id: the parent.
        node: its node.
        generation: in which the node started or continued the child.
        item: the item of a map; None for another node.
    """

    flow_id: int
    node: str
    generation: int
    item: int | None


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """The task that the end of a flow wakes.

    Attributes:
        id: task id.
        step: in which it began to wait.
        stage: that it enters.
    """

    id: int
    step: int
    stage: str


@dataclass(slots=True, kw_only=True)
class FlowRow:
    """A flow.

    Attributes:
        id: flow id.
        root_id: the flow at the top; its own id for a root.
        parent: its place; None for a root.
        name: of its definition.
        version: of its definition.
        versions: versions of the definitions below the root, by name.
        state: what `penstock.core.flow` decides by.
        priority: that of the root.
        inputs: a JSON object.
        events: `final` or `all`.
        callbacks: as in the column.
        labels: by name.
        idempotency_key: of its start.
        traceparent: that of the root.
        schedule: that started the root.
        tick: of the schedule.
        task: the task that waits for it.
        definition: its own; None for a flow that names a stored one.
        output: of a flow that succeeded.
        error: why it did not succeed, for people.
    """

    id: int
    root_id: int
    parent: ParentPlace | None
    name: str
    version: int
    versions: Mapping[str, int]
    state: FlowState
    priority: int
    inputs: Context
    events: str = "final"
    callbacks: Sequence[str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    idempotency_key: str | None = None
    traceparent: str | None = None
    schedule: str | None = None
    tick: datetime | None = None
    task: WaitingTask | None = None
    definition: Mapping[str, Any] | None = None
    output: Context | None = None
    error: str | None = None


@dataclass(slots=True)
class NodeRow:
    """A node.

    Attributes:
        state: what `penstock.core.flow` decides by.
        list: of a map.
        output: of a node that succeeded.
    """

    state: NodeState = field(default_factory=NodeState)
    list: Context | None = None
    output: Context | None = None


async def shards_with_inbox(session: Session, shards: Iterable[int]) -> list[int]:
    """The shards, out of these, whose inbox has rows."""
    return [row["shard"] for row in await session.fetch("flows.with_inbox", list(shards))]


async def next_due_s(session: Session, shards: Iterable[int]) -> float | None:
    """Seconds until the first limit of these shards is due; negative when it is overdue."""
    wait_s: float | None = await session.fetchval("flows.next_due", list(shards))
    return wait_s


class FlowsLocked(Exception):  # noqa: N818 (a signal to the owner, which handles it)
    """Another transaction locks flows.

    Attributes:
        roots: their root flows.
    """

    def __init__(self, roots: Collection[int]) -> None:
        super().__init__(roots)
        self.roots = roots


async def lock(
    connection: Any, ids: Iterable[int], levels: int = 0
) -> tuple[dict[int, FlowRow], datetime | None]:
    """Locks flows; returns them, and the transaction's time.

    Args:
        connection: inside the transaction.
        ids: of the flows.
        levels: so many ancestors of each are locked as well, if they may end with it.

    Raises:
        FlowsLocked: another transaction locks some of the flows.
    """
    wanted = sorted(ids)
    rows = await fetch(connection, "flows.lock", wanted, levels)
    if missing := set(wanted).difference(row["id"] for row in rows):
        roots = await fetch(connection, "flows.roots", sorted(missing))
        if roots:
            raise FlowsLocked({row["root_id"] for row in roots})
    return {row["id"]: _flow(row) for row in rows}, rows[0]["now"] if rows else None


async def nodes(connection: Any, keys: Sequence[tuple[int, str]]) -> dict[tuple[int, str], NodeRow]:
    """The given nodes that have a row; all others are pending."""
    rows = await fetch(connection, "flows.nodes", [key[0] for key in keys], [key[1] for key in keys])
    return {(row["flow_id"], row["name"]): _node(row) for row in rows}


def json_of(row: asyncpg.Record, name: str) -> Context | None:
    """A column with JSON, or the reference beside it; None without either."""
    data, ref = row[name], row[f"{name}_ref"]
    if data is None and ref is None:
        return None
    return Context(ContentType.JSON, data, ObjectRef.from_wire(orjson.loads(ref)) if ref else None)


def state_of(row: Mapping[str, Any] | asyncpg.Record) -> FlowState:
    """The state in a row of a flow, by which `penstock.core.flow` decides."""
    return FlowState(
        unfinished=row["unfinished"],
        status=FlowStatus(row["status"]),
        generation=row["generation"],
        paused=row["paused"],
        stop=StopReason(row["stop"]) if row["stop"] else None,
        live=row["live"],
        unsuccessful=row["unsuccessful"],
    )


def items_of(row: Mapping[str, Any] | asyncpg.Record) -> Items | None:
    """The counters of a map's row whose list is known; None for other nodes."""
    if row["total"] is None:
        return None
    return Items(
        row["total"], row["opened"], row["succeeded"], row["unsuccessful"], row["retry"], row["enough"]
    )


def _flow(row: asyncpg.Record) -> FlowRow:
    parent = None
    if row["parent_id"] is not None:
        parent = ParentPlace(
            row["parent_id"], row["parent_node"], row["parent_generation"], row["parent_item"]
        )
    return FlowRow(
        id=row["id"],
        root_id=row["root_id"],
        parent=parent,
        name=row["name"],
        version=row["version"],
        versions=orjson.loads(row["versions"]) if row["versions"] else {},
        state=state_of(row),
        priority=row["priority"],
        inputs=json_of(row, "inputs") or NO_INPUTS,
        events=row["events"],
        callbacks=row["callbacks"],
        labels=orjson.loads(row["labels"]) if row["labels"] else {},
        idempotency_key=row["idempotency_key"],
        traceparent=row["traceparent"],
        schedule=row["schedule"],
        tick=row["tick"],
        task=WaitingTask(row["task_id"], row["task_step"], row["task_stage"]) if row["task_id"] else None,
        definition=orjson.loads(row["definition"]) if row["definition"] else None,
    )


def _node(row: asyncpg.Record) -> NodeRow:
    items = items_of(row)
    state = NodeState(
        status=NodeStatus(row["status"]),
        generation=row["generation"],
        edge_states=_edge_states(row["arrivals"]),
        case=row["chosen_case"],
        timed_out=Limit(row["timed_out"]) if row["timed_out"] else None,
        recovers=row["recovers"],
        items=items,
        reason=row["reason"] or "",
    )
    return NodeRow(
        state,
        json_of(row, "list") if items is not None else None,
        context_of(row, "output"),
    )


def _edge_states(text: str | None) -> dict[int, EdgeState]:
    if not text:
        return {}
    return {int(position): EdgeState(state) for position, state in orjson.loads(text).items()}
