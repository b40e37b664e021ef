"""Ends nodes and flows: outputs, the report to the parent, events, and cancellations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC
from functools import partial
from typing import Any

import orjson

from penstock.contracts.context import ContentType, Context
from penstock.contracts.event import FINAL_EVENTS, Event
from penstock.core.access import namespace_of
from penstock.core.flow.messages import Ended, ItemEnded, Refuse
from penstock.core.flow.result_parts import PART_ITEMS
from penstock.core.flow.state import FlowStatus, Items, NodeStatus, Outcome
from penstock.core.flow.waiting import EVENT
from penstock.errors import InvalidExpression
from penstock.flow_owner.batch import Batch
from penstock.flow_owner.evaluation import Scope
from penstock.flow_owner.result_lists import Collected, Faults, ItemResults, encoded, fetch_part, result_of
from penstock.postgres import advance
from penstock.postgres.flow_writes import NewNote, Wake
from penstock.postgres.flows import SHARDS, FlowRow, ParentPlace
from penstock.postgres.outbox import PendingEvent
from penstock.postgres.queries import execute, fetch, fetchrow

# Tasks that one transaction cancels.
CANCEL_CHUNK = 1_000
# Characters of the reason for which a child flow failed. Its first node and the cause at its end
# are kept.
_MAX_REASON = 1_000
_REASON_BEGIN = 200

_OUTCOMES = {
    FlowStatus.SUCCEEDED: Outcome.SUCCEEDED,
    FlowStatus.FAILED: Outcome.FAILED,
    FlowStatus.CANCELLED: Outcome.CANCELLED,
}


async def end_flow(batch: Batch, flow: FlowRow) -> None:
    """Ends a flow: its output, its report to the parent, its event and callbacks."""
    batch.changed(flow)
    if flow.state.status is FlowStatus.SUCCEEDED:
        flow.output, flow.error = await _output(batch, flow)
        if flow.error is not None:
            # Otherwise a parent would go on with null.
            flow.state = flow.state._replace(status=FlowStatus.FAILED)
    else:
        flow.output, flow.error = None, await _reason(batch, flow)
    batch.ended.append(flow.id)
    if flow.parent is None and flow.task is None and flow.tick is not None:
        batch.ended_runs.add(flow.id)
    detail = flow.output.to_wire("output") if flow.output else {}
    if flow.error is not None:
        detail["error"] = {"kind": "FlowFailed", "message": flow.error}
    report(batch, flow, flow.state.status.value, detail)
    parent = flow.parent
    if flow.task is not None:
        batch.wakes.append(Wake(flow.task, await _woken_context(batch, flow)))
    if parent is None:
        return
    note = NewNote(
        root_id=flow.root_id,
        flow_id=parent.flow_id,
        kind="task",
        node=parent.node,
        generation=parent.generation,
        item=parent.item,
        state=flow.state.status.value,
        detail={"flow": flow.id},
    )
    if (parent.flow_id, parent.node) in batch.contents.lists.committed_first:
        batch.notes.append(note)
        return
    if parent.item is not None:
        batch.ended_items.add((parent.flow_id, parent.node))
    batch.send(note, child_end(batch, flow.id, parent, flow.state.status, flow.output, flow.error))


def child_end(
    batch: Batch,
    child_id: int,
    parent: ParentPlace,
    status: FlowStatus,
    output: Context | None,
    error: str | None,
) -> Ended | ItemEnded:
    """The message by which a parent receives the end of a child flow; keeps the child's output."""
    outcome = _OUTCOMES[status]
    if parent.item is not None:
        return ItemEnded(parent.node, parent.item, parent.generation, outcome)
    if output is not None:
        batch.outputs[parent.flow_id, parent.node, parent.generation] = output
    reason = _shortened(f"flow {child_id}: {error}") if error else ""
    return Ended(parent.node, parent.generation, outcome, reason)


def _shortened(reason: str) -> str:
    """A reason without its middle: in nested flows each level would add to that of its child."""
    if len(reason) <= _MAX_REASON:
        return reason
    return f"{reason[:_REASON_BEGIN]} … {reason[_REASON_BEGIN - _MAX_REASON + 3 :]}"


def refuse(batch: Batch, flow: FlowRow, action: Refuse) -> None:
    """Ends the node of a parent whose child flow cannot be recovered.

    A command of an operator that is refused has no effect.
    """
    parent = flow.parent
    if parent is None or flow.state.status is FlowStatus.RUNNING:
        return
    if parent.item is not None:
        batch.add(parent.flow_id, ItemEnded(parent.node, parent.item, parent.generation, Outcome.FAILED))
    else:
        reason = f"flow {flow.id} cannot be recovered: {action.code}"
        batch.add(parent.flow_id, Ended(parent.node, parent.generation, Outcome.FAILED, reason))


async def collect_output(batch: Batch, flow: FlowRow, name: str) -> None:
    """Sets the output of a map that succeeded: the results of its items, null where one failed.

    A result that can never be read is null, too, and the node's reason says so: otherwise the flow
    would never end.

    Raises:
        Uncollected: the list must be collected first.
    """
    found = await _results(batch, flow, name)
    # After the results, because reading them writes what has changed so far.
    row = batch.changed_node(flow, name)
    if found.fault:
        row.state = row.state._replace(reason=found.fault)
    row.output = found.context


async def _results(batch: Batch, flow: FlowRow, name: str, opening: bytes | None = None) -> Collected:
    """The list of the results of a map, or the context that has it behind `opening`."""
    node = batch.nodes[flow.id, name].state
    is_task = batch.definition(flow).nodes[name]["each"]["kind"] == "task"
    total = node.items.total if node.items is not None else 0
    namespace = namespace_of(flow.name)
    wanted = ItemResults(flow.root_id, flow.id, name, node.generation, total, is_task, namespace, opening)
    fetch_here = partial(fetch, batch.connection)
    if not is_task:
        # A child flow that ended in this transaction has its output in memory.
        await batch.write()
    if total <= PART_ITEMS:
        rows = await fetch_part(wanted, fetch_here, range(total))
        contexts = [result_of(row) for row in rows]
        if all(context is None or context.ref is None for context in contexts):
            faults = Faults()
            pieces = [encoded(item, context, faults) for item, context in enumerate(contexts)]
            context = Context(ContentType.JSON, wanted.framed(pieces, faults))
            return Collected(batch.scope(flow).refer(context, namespace), faults.reason)
    is_committed = (flow.id, name) not in batch.ended_items
    return await batch.contents.lists.get(wanted, fetch_here, is_committed=is_committed)


def _readable(scope: Scope, context: Context | None, faults: list[str]) -> Any:
    """The value of a context; None, with an entry in `faults`, if it can never be read."""
    try:
        return scope.resolved(context)
    except InvalidExpression as error:
        faults.append(str(error))
        return None


async def cancel(batch: Batch, flow: FlowRow, name: str | None) -> None:
    """Cancels what runs in a flow, or in one of its nodes; each child reports its end."""
    await batch.write()
    connection = batch.connection
    found = await fetch(connection, "flows.live_tasks", flow.id, name, CANCEL_CHUNK)
    if found:
        ids = [record["id"] for record in found]
        _cancelled, entry = await advance.cancel_within(connection, ids, source=batch.source)
        batch.outbox.append(entry)
    if len(found) == CANCEL_CHUNK:
        batch.notes.append(NewNote(root_id=flow.root_id, flow_id=flow.id, kind="cancel_live", node=name))
        return
    await command_children(batch, flow, name, "cancel")
    for record in await fetch(connection, "flows.unwait", flow.id, name):
        batch.add(flow.id, Ended(record["node"], record["generation"], Outcome.CANCELLED))


async def announce_ends(batch: Batch, recovered: Collection[int]) -> None:
    """Wakes requests that wait for recovered flows which have ended in this transaction.

    The rows of such a flow do not show an end: before and after the transaction it has ended. A
    recovery that was refused changes no row at all.
    """
    flows = [batch.loaded[flow_id] for flow_id in sorted(batch.loaded.keys() & recovered)]
    if ended := [flow.id for flow in flows if flow.state.status is not FlowStatus.RUNNING]:
        await execute(batch.connection, "flows.announce_ends", ended)


async def command_children(batch: Batch, flow: FlowRow, name: str | None, kind: str) -> None:
    """Passes a command on to the child flows of a flow, or of one of its nodes."""
    await execute(
        batch.connection,
        "flows.command_children",
        flow_id=flow.id,
        node=name,
        kind=kind,
        recovering=sorted(batch.recovering),
    )
    batch.noted.add(flow.root_id % SHARDS)


def report(batch: Batch, flow: FlowRow, word: str, detail: Mapping[str, Any] | None = None) -> None:
    """Enqueues an event of a flow, with its callbacks.

    A flow that a task waits for has none: the task has.
    """
    assert batch.now is not None
    name = f"flow.{word}"
    if flow.task is not None or not (flow.callbacks or flow.events == "all" or name in FINAL_EVENTS):
        return
    event = Event(
        id=f"flow-{flow.id}-{flow.state.generation}-{word}",
        name=name,
        at=batch.now.astimezone(UTC),
        flow={
            "id": flow.id,
            "root_id": flow.root_id,
            "name": flow.name,
            "version": flow.version,
            "generation": flow.state.generation,
            "status": flow.state.status.value,
            "idempotency_key": flow.idempotency_key,
            "labels": flow.labels,
        },
        detail=detail or {},
    )
    batch.events.append(PendingEvent(event, flow.callbacks, flow.events, flow.traceparent))


async def _woken_context(batch: Batch, flow: FlowRow) -> Context:
    """The context of the stage that a waiting task enters."""
    [name] = batch.definition(flow).nodes
    await batch.load_nodes([(flow.id, name)])
    scope, state = batch.scope(flow), batch.nodes[flow.id, name].state
    faults: list[str] = []
    given = _readable(scope, flow.inputs, faults)
    context: dict[str, Any] = {"context": given.get("context") if isinstance(given, dict) else None}
    if name == EVENT:
        event = _readable(scope, flow.output, faults)
        context |= {"event": event, "timed_out": state.timed_out is not None}
        if state.status is not NodeStatus.SUCCEEDED and state.timed_out is None:
            context["error"] = state.reason
    else:
        return await _woken_by_children(batch, flow, name, context, faults)
    if faults:
        context["error"] = faults[0]
    return scope.refer(Context.encode(context), namespace_of(flow.name))


async def _woken_by_children(
    batch: Batch, flow: FlowRow, name: str, context: dict[str, Any], faults: Sequence[str]
) -> Context:
    """The context of a task that has waited for its children, with the list of their results."""
    state = batch.nodes[flow.id, name].state
    items = state.items or Items()
    children: dict[str, Any] = {
        "total": items.total,
        "succeeded": items.succeeded,
        "unsuccessful": items.unsuccessful,
    }
    if state.reason:
        children["error"] = state.reason
    if faults:
        context["error"] = faults[0]
    context["children"] = children
    # The results come last, so the object of the children and that around it are left open.
    opening = orjson.dumps(context)[:-2] + b',"results":'
    return (await _results(batch, flow, name, opening)).context


async def _output(batch: Batch, flow: FlowRow) -> tuple[Context | None, str | None]:
    """The output of a flow that succeeded, or why it has none."""
    definition = batch.definition(flow)
    if definition.output is None:
        return None, None
    await batch.load_nodes((flow.id, name) for name in definition.reads(None))
    scope, namespace = batch.scope(flow), namespace_of(flow.name)
    try:
        output = scope.context(definition.output, namespace)
        if output.content_type is not ContentType.JSON:
            output = scope.refer(Context.encode(scope.resolved(output)), namespace)
    except InvalidExpression as error:
        return None, f"the output: {error}"
    return output, None


async def _reason(batch: Batch, flow: FlowRow) -> str | None:
    if flow.state.status is FlowStatus.CANCELLED:
        return None
    if flow.state.stop is not None and flow.state.stop.value == "timeout":
        return "timeout_s is over"
    for name in batch.definition(flow).nodes:
        row = batch.nodes.get((flow.id, name))
        if row is not None and row.state.status is NodeStatus.FAILED:
            return _failed(name, row.state.status.value, row.state.reason)
    found = await fetchrow(batch.connection, "flows.first_failed", flow.id)
    return _failed(found["name"], found["status"], found["reason"]) if found else None


def _failed(name: str, status: str, reason: str | None) -> str:
    return f"node {name!r} {status}" + (f": {reason}" if reason else "")
