"""The rows of flows as their owner writes them, many flows in a statement.

Every function runs in a transaction of its caller, inside
`penstock.postgres.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple

import orjson

from penstock.contracts.context import Context
from penstock.core.flow.state import EdgeState, FlowState, Items
from penstock.postgres.advance import transition_event
from penstock.postgres.flows import FlowRow, NodeRow, ParentPlace, WaitingTask
from penstock.postgres.outbox import PendingEvent, sparse
from penstock.postgres.queries import execute, fetch
from penstock.postgres.tasks import encode_ref


@dataclass(frozen=True, slots=True)
class Wake:
    """A waiting task, and the context of the stage that it enters."""

    task: WaitingTask
    context: Context


class NewTask(NamedTuple):
    """The task of a node or item."""

    type: str
    stage: str | None
    priority: int
    context: Context
    key: str | None
    flow: FlowRow
    node: str
    generation: int
    item: int | None


class NewChild(NamedTuple):
    """A child flow to insert."""

    parent: FlowRow
    node: str
    generation: int
    item: int | None
    name: str
    version: int
    unfinished: int
    inputs: Context


class NewLimit(NamedTuple):
    """A moment to report; `node` is empty for a limit of the flow, `kind` may be `timer`."""

    flow: FlowRow
    node: str
    generation: int
    kind: str
    at: datetime


class NewWait(NamedTuple):
    """A wait for an event."""

    flow: FlowRow
    node: str
    generation: int
    namespace: str
    event: str
    key: str


class NewNote(NamedTuple):
    """A row of the inbox. The end of a child flow is a `task` whose `detail` names the child."""

    root_id: int
    flow_id: int
    kind: str
    node: str | None = None
    generation: int | None = None
    item: int | None = None
    state: str | None = None
    detail: Mapping[str, Any] | None = None


async def write_flows(connection: Any, flows: Sequence[FlowRow], ended: Sequence[int]) -> None:
    """Writes the states, outputs and errors of flows; those that have ended wait for nothing."""
    states = [flow.state for flow in flows]
    await execute(
        connection,
        "flows.write_flows",
        id=[flow.id for flow in flows],
        status=[state.status.value for state in states],
        generation=sparse([state.generation or None for state in states]),
        paused=sparse([state.paused or None for state in states]),
        stop=sparse([state.stop and state.stop.value for state in states]),
        unfinished=[state.unfinished for state in states],
        live=[state.live for state in states],
        unsuccessful=sparse([state.unsuccessful or None for state in states]),
        output=sparse([flow.output.data if flow.output else None for flow in flows]),
        output_ref=sparse([encode_ref(flow.output.ref) if flow.output else None for flow in flows]),
        error=sparse([_storable(flow.error) for flow in flows]),
        ended=ended,
    )


async def write_version(connection: Any, flow: FlowRow) -> None:
    """Writes the version of a flow, the versions below it, and its inputs."""
    await execute(
        connection,
        "flows.write_version",
        id=flow.id,
        version=flow.version,
        versions=orjson.dumps(flow.versions).decode() if flow.versions else None,
        inputs=flow.inputs.data,
        inputs_ref=encode_ref(flow.inputs.ref),
    )


async def write_nodes(connection: Any, changed: Mapping[tuple[int, str], NodeRow]) -> None:
    """Writes nodes."""
    rows = list(changed.values())
    states = [row.state for row in rows]
    items = [state.items or Items() for state in states]
    await execute(
        connection,
        "flows.write_nodes",
        flow_id=[key[0] for key in changed],
        name=[key[1] for key in changed],
        status=[state.status.value for state in states],
        generation=sparse([state.generation or None for state in states]),
        arrivals=sparse([_edge_states_text(state.edge_states) for state in states]),
        chosen_case=sparse([state.case for state in states]),
        timed_out=sparse([state.timed_out and state.timed_out.value for state in states]),
        recovers=sparse([state.recovers or None for state in states]),
        total=sparse([state.items.total if state.items is not None else None for state in states]),
        opened=sparse([each.opened or None for each in items]),
        succeeded=sparse([each.succeeded or None for each in items]),
        unsuccessful=sparse([each.unsuccessful or None for each in items]),
        retry=sparse([each.retry or None for each in items]),
        enough=sparse([each.enough or None for each in items]),
        reason=sparse([_storable(state.reason or None) for state in states]),
        list=sparse([row.list.data if row.list else None for row in rows]),
        list_ref=sparse([encode_ref(row.list.ref) if row.list else None for row in rows]),
        output_type=sparse([row.output.content_type.value if row.output else None for row in rows]),
        output=sparse([row.output.data if row.output else None for row in rows]),
        output_ref=sparse([encode_ref(row.output.ref) if row.output else None for row in rows]),
    )


async def insert_tasks(connection: Any, tasks: Sequence[NewTask]) -> None:
    """Inserts tasks; one whose place in its flow is taken already is left out."""
    contexts = [task.context for task in tasks]
    await execute(
        connection,
        "flows.insert_tasks",
        type=[task.type for task in tasks],
        stage=sparse([task.stage for task in tasks]),
        priority=[task.priority for task in tasks],
        content_type=[context.content_type.value for context in contexts],
        context=[context.data for context in contexts],
        context_ref=sparse([encode_ref(context.ref) for context in contexts]),
        key=sparse([task.key for task in tasks]),
        traceparent=sparse([task.flow.traceparent for task in tasks]),
        flow_id=[task.flow.id for task in tasks],
        root_id=[task.flow.root_id for task in tasks],
        flow_priority=[task.flow.priority for task in tasks],
        node=[task.node for task in tasks],
        generation=sparse([task.generation or None for task in tasks]),
        item=sparse([task.item for task in tasks]),
    )


async def insert_children(connection: Any, children: Sequence[NewChild]) -> list[FlowRow]:
    """Inserts child flows; returns them in the order given.

    A child that exists already is an error of the owner, so the transaction ends.
    """
    rows = await fetch(
        connection,
        "flows.insert_children",
        root_id=[child.parent.root_id for child in children],
        parent_id=[child.parent.id for child in children],
        node=[child.node for child in children],
        generation=sparse([child.generation or None for child in children]),
        item=sparse([child.item for child in children]),
        **_columns(children, "name", "version", "unfinished"),
        priority=[child.parent.priority for child in children],
        inputs=[child.inputs.data for child in children],
        inputs_ref=sparse([encode_ref(child.inputs.ref) for child in children]),
    )
    return [
        FlowRow(
            id=row["id"],
            root_id=child.parent.root_id,
            parent=ParentPlace(child.parent.id, child.node, child.generation, child.item),
            name=child.name,
            version=child.version,
            versions=child.parent.versions,
            state=FlowState(unfinished=child.unfinished),
            priority=child.parent.priority,
            inputs=child.inputs,
            traceparent=child.parent.traceparent,
            schedule=child.parent.schedule,
            tick=child.parent.tick,
        )
        for row, child in zip(rows, children, strict=True)
    ]


async def wake(connection: Any, wakes: Sequence[Wake]) -> list[PendingEvent]:
    """Lets waiting tasks enter their next stages; returns the events of those that still waited."""
    rows = await fetch(
        connection,
        "flows.wake",
        id=[each.task.id for each in wakes],
        step=[each.task.step for each in wakes],
        stage=[each.task.stage for each in wakes],
        context=[each.context.data for each in wakes],
        context_ref=[encode_ref(each.context.ref) for each in wakes],
    )
    return [transition_event(row, "woken", {}) for row in rows]


async def write_limits(connection: Any, limits: Sequence[NewLimit]) -> None:
    """Writes moments to report."""
    columns = _columns(limits, "node", "generation", "kind", "at")
    await execute(connection, "flows.write_limits", **_flow_ids(limits), **columns)


async def write_waits(connection: Any, waits: Sequence[NewWait]) -> None:
    """Writes waits; `match_events` compares them with the events after the commit."""
    columns = _columns(waits, "node", "generation", "namespace", "event", "key")
    await execute(connection, "flows.write_waits", **_flow_ids(waits), **columns)


async def write_inbox(connection: Any, notes: Sequence[NewNote]) -> None:
    """Writes rows of the inbox, without a notification."""
    await execute(
        connection,
        "flows.write_inbox",
        **_columns(notes, "root_id", "flow_id", "kind", "node", "generation", "item", "state"),
        detail=sparse(
            [None if note.detail is None else orjson.dumps(note.detail).decode() for note in notes]
        ),
    )


def _columns(rows: Sequence[Any], *names: str) -> dict[str, list[Any]]:
    return {name: list(map(attrgetter(name), rows)) for name in names}


def _flow_ids(rows: Sequence[NewLimit | NewWait]) -> dict[str, list[int]]:
    return {"root_id": [row.flow.root_id for row in rows], "flow_id": [row.flow.id for row in rows]}


def _storable(text: str | None) -> str | None:
    """A text for people. PostgreSQL has no NUL, which an error of a task, or a value, may have."""
    return text and text.replace("\0", "\ufffd").encode(errors="replace").decode()


def _edge_states_text(edge_states: Mapping[int, EdgeState]) -> str | None:
    if not edge_states:
        return None
    return orjson.dumps({str(position): state.value for position, state in edge_states.items()}).decode()
