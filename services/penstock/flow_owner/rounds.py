"""Applies messages in rounds, until no flow has another.

A decision can end a child flow, whose end its parent receives in the next round; and it can need
rows that the round has not read. One module, because all rounds are one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import asyncpg
import orjson

from penstock.contracts.context import Context
from penstock.core.flow.decide import Decision, rows
from penstock.core.flow.messages import (
    Action,
    Began,
    Cancelled,
    CancelLive,
    CancelNode,
    Ended,
    EndFlow,
    ItemEnded,
    LimitReached,
    Message,
    OpenItems,
    Paused,
    Recovered,
    Refuse,
    ReopenItems,
    Resumed,
    SetLimit,
    Start,
    Visited,
    Warn,
)
from penstock.core.flow.state import (
    FINAL_NODES,
    FlowStatus,
    Limit,
    NodeStatus,
    Outcome,
)
from penstock.flow_owner.batch import Batch, NodeKey
from penstock.flow_owner.changing import change_version
from penstock.flow_owner.contents import ContentsMissing
from penstock.flow_owner.ending import (
    announce_ends,
    cancel,
    child_end,
    collect_output,
    command_children,
    end_flow,
    refuse,
    report,
)
from penstock.flow_owner.result_lists import Uncollected
from penstock.flow_owner.starting import open_items, reopen_items, start
from penstock.postgres.flow_writes import NewLimit, NewNote
from penstock.postgres.flows import SHARDS, FlowRow, NodeRow, ParentPlace, json_of
from penstock.postgres.queries import execute, fetch
from penstock.postgres.tasks import context_of

_OUTCOMES = {
    "succeeded": Outcome.SUCCEEDED,
    "failed": Outcome.FAILED,
    "quarantined": Outcome.FAILED,
    "cancelled": Outcome.CANCELLED,
}
_COMMANDS: Mapping[str, Message] = {"pause": Paused(), "resume": Resumed(), "cancel": Cancelled()}


async def apply(
    batch: Batch, inbox: Sequence[asyncpg.Record], due: Sequence[asyncpg.Record]
) -> dict[int, list[Context]]:
    """Applies rows of the inbox and limits that are due, and writes what follows.

    Returns:
        By root flow, the objects that must be fetched first; none where a list of results must be
        collected, or committed, first. If it has any root flow, nothing may be committed.

    Raises:
        NotFound: a definition is missing.
    """
    missing: dict[int, list[Context]] = {}
    await _read_inbox(batch, inbox)
    await _read_due(batch, due)
    while batch.next:
        await _round(batch, missing)
    if not missing:
        await batch.write()
        await announce_ends(batch, {row["flow_id"] for row in inbox if row["kind"] == "recover"})
    return missing


async def _round(batch: Batch, missing: dict[int, list[Context]]) -> None:
    current, batch.next = batch.next, {}
    await batch.load_flows(current)
    for flow_id, messages in current.items():
        commands = [each for each in messages if isinstance(each, Recovered)]
        if 0 < len(commands) < len(messages):
            # The history keeps what ended before a recovery, so that is applied and written first.
            current[flow_id] = [each for each in messages if not isinstance(each, Recovered)]
            batch.add(flow_id, *commands)
        elif any(each.version is not None for each in commands):
            await _change_versions(batch, flow_id, current, missing)
    await batch.load_nodes(_needed(batch, current))
    for flow_id in sorted(current):
        flow = batch.loaded.get(flow_id)
        # A flow in history has ended, and receives nothing more.
        if flow is None or missing.get(flow.root_id) or flow_id in batch.postponed:
            continue
        try:
            await _decide(batch, flow, current[flow_id])
        except ContentsMissing as error:
            missing.setdefault(flow.root_id, []).append(error.context)
        except Uncollected as error:
            # The other flows of the family are decided, so that their lists are found at once.
            missing.setdefault(flow.root_id, [])
            batch.postponed.add(flow_id)
            if error.results is not None:
                batch.uncollected.setdefault(flow.root_id, []).append(error.results)
    await batch.insert_children()


async def _change_versions(
    batch: Batch,
    flow_id: int,
    current: dict[int, list[Message]],
    missing: dict[int, list[Context]],
) -> None:
    flow = batch.loaded.get(flow_id)
    if flow is None or flow.root_id in missing:
        return
    # A second recovery of the same generation has no effect.
    [command, *_] = [each for each in current[flow_id] if isinstance(each, Recovered)]
    try:
        remaining = await change_version(batch, flow, command)
    except ContentsMissing as error:
        missing.setdefault(flow.root_id, []).append(error.context)
        remaining = None
    current[flow_id] = [] if remaining is None else [remaining]


def _needed(batch: Batch, current: Mapping[int, Sequence[Message]]) -> Iterable[NodeKey]:
    for flow_id, messages in current.items():
        flow = batch.loaded.get(flow_id)
        if flow is None:
            continue
        definition = batch.definition(flow)
        # Read together with the nodes whose outputs they read, since most of them start.
        yield from batch.reads(flow, rows(definition.plan, messages))


async def _decide(batch: Batch, flow: FlowRow, messages: Sequence[Message]) -> None:
    assert batch.now is not None
    if (flow.parent or flow.task) and flow.state.status is not FlowStatus.RUNNING:
        # The flow has ended since the gateway took the command, and its end is counted.
        messages = [each for each in messages if not isinstance(each, Recovered) or each.in_place]
    definition = batch.definition(flow)
    batch.work += 1
    if any(isinstance(each, Recovered) for each in messages):
        await batch.write()
    nodes = {name: row.state for name, row in _loaded_nodes(batch, flow)}
    before = flow.state
    decision = definition.decisions.decide(before, messages, batch.now, nodes=nodes)
    if decision.flow.generation > before.generation:
        await _keep_history(batch, flow, decision)
    await _merge(batch, flow, decision)
    if Began() in messages and before.live == 0:
        report(batch, flow, "started")
    if decision.flow.generation > before.generation:
        report(batch, flow, "recovered")
    elif decision.flow.paused != before.paused:
        report(batch, flow, "paused" if decision.flow.paused else "resumed")
    for action in decision.actions:
        await _act(batch, flow, action)
    await _visit(batch, flow, decision)


def _loaded_nodes(batch: Batch, flow: FlowRow) -> Iterable[tuple[str, NodeRow]]:
    for name in batch.definition(flow).nodes:
        row = batch.nodes.get((flow.id, name))
        if row is not None:
            yield name, row


async def _keep_history(batch: Batch, flow: FlowRow, decision: Decision) -> None:
    ended = [name for name in decision.nodes if batch.nodes[flow.id, name].state.status in FINAL_NODES]
    await execute(batch.connection, "flows.keep_history", flow.id, ended, flow.state.generation)


async def _merge(batch: Batch, flow: FlowRow, decision: Decision) -> None:
    if decision.flow != flow.state:
        batch.changed(flow).state = decision.flow
    listed = batch.definition(flow).listed_maps
    for name, state in decision.nodes.items():
        row = batch.changed_node(flow, name)
        row.state = state
        if state.items is None and state.status is not NodeStatus.RUNNING:
            row.list = None
        if state.status is not NodeStatus.SUCCEEDED:
            row.output = None
        elif name in listed:
            await collect_output(batch, flow, name)
        else:
            row.output = batch.outputs.get((flow.id, name, state.generation), row.output)


async def _act(batch: Batch, flow: FlowRow, action: Action) -> None:
    match action:
        case Start():
            await start(batch, flow, action)
        case OpenItems():
            await open_items(batch, flow, action)
        case ReopenItems():
            await reopen_items(batch, flow, action)
        case CancelNode(node, _):
            await cancel(batch, flow, node)
        case CancelLive():
            await cancel(batch, flow, None)
        case SetLimit(node, generation, limit, at):
            batch.limits.append(NewLimit(flow, node or "", generation, limit.value, at))
        case Warn(node, _):
            report(batch, flow, "late", {"node": node} if node else {})
        case EndFlow():
            await end_flow(batch, flow)
        case Refuse():
            refuse(batch, flow, action)


async def _visit(batch: Batch, flow: FlowRow, decision: Decision) -> None:
    names = set(decision.visit)
    if decision.visit_eligible:
        found = await fetch(batch.connection, "flows.eligible", flow.id)
        names |= {record["name"] for record in found}
        names |= {
            name
            for name, row in _loaded_nodes(batch, flow)
            if row.state.status is NodeStatus.READY
            or (row.state.status is NodeStatus.RUNNING and row.state.items is not None)
        }
    if names:
        batch.add(flow.id, *map(Visited, sorted(names)))
    batch.notes += [
        NewNote(root_id=flow.root_id, flow_id=flow.id, kind="visit", node=name)
        for name in sorted(decision.later)
    ]


async def _read_inbox(batch: Batch, inbox: Sequence[asyncpg.Record]) -> None:
    recoveries = [record for record in inbox if record["kind"] == "recover"]
    # Before any command, which must reach them.
    batch.recovering |= {record["flow_id"] for record in recoveries}
    # Commands behind a recovery are left in the inbox.
    batch.noted |= {record["root_id"] % SHARDS for record in recoveries}
    await batch.load_flows(record["flow_id"] for record in inbox)
    inbox = [record for record in inbox if record["flow_id"] in batch.loaded]
    data = await _event_data(batch, inbox)
    runs = await _runs(batch, inbox)
    for record in inbox:
        flow_id, kind, node = record["flow_id"], record["kind"], record["node"]
        match kind:
            case "began":
                batch.add(flow_id, Began())
            case "task":
                end = _task_end(batch, record) if record["task_id"] else _child_end(batch, record, runs)
                batch.add(flow_id, end)
            case "event" if "flow" in (detail := orjson.loads(record["detail"])):
                batch.add(flow_id, _run_end(batch, record, detail, runs.get(detail["flow"])))
            case "event":
                if (found := data.get(_event_key(record))) is not None:
                    batch.outputs[flow_id, node, record["generation"]] = found
                batch.add(flow_id, Ended(node, record["generation"], Outcome.SUCCEEDED))
            case "visit":
                batch.add(flow_id, Visited(node))
            case "cancel_live":
                await cancel(batch, batch.loaded[flow_id], node)
            case "recover":
                detail = orjson.loads(record["detail"])
                batch.add(flow_id, _recovery(detail))
            case _:
                await _command(batch, batch.loaded[flow_id], kind)


def _recovery(detail: Mapping[str, Any]) -> Recovered:
    return Recovered(
        detail["generation"],
        frozenset(detail.get("nodes", ())),
        in_place=detail.get("in_place", False),
        version=detail.get("version"),
        versions=detail.get("versions") or {},
    )


async def _command(batch: Batch, flow: FlowRow, kind: str) -> None:
    batch.add(flow.id, _COMMANDS[kind])
    if kind != "cancel" and flow.state.status is FlowStatus.RUNNING:
        # A cancellation reaches the children by its decision.
        await command_children(batch, flow, None, kind)


def _task_end(batch: Batch, record: asyncpg.Record) -> Message:
    outcome = _OUTCOMES[record["state"]]
    node, generation = record["node"], record["generation"]
    if record["item"] is not None:
        return ItemEnded(node, record["item"], generation, outcome)
    if outcome is Outcome.SUCCEEDED:
        output = context_of(record, "result")
        if output is not None:
            batch.outputs[record["flow_id"], node, generation] = output
    reason = ""
    if outcome is Outcome.FAILED:
        error = orjson.loads(record["error"]) if record["error"] else {}
        reason = f"task {record['task_id']} {record['state']}: {error.get('message', 'no reason')}"
    return Ended(node, generation, outcome, reason)


def _child_end(batch: Batch, record: asyncpg.Record, runs: Mapping[int, asyncpg.Record]) -> Message:
    """The end of a child flow in an earlier transaction (`Batch.send`)."""
    child_id = orjson.loads(record["detail"])["flow"]
    place = ParentPlace(record["flow_id"], record["node"], record["generation"], record["item"])
    child = runs.get(child_id)
    output = _output_of(child) if child is not None else None
    error = child["error"] if child is not None else None
    return child_end(batch, child_id, place, FlowStatus(record["state"]), output, error)


def _output_of(run: asyncpg.Record) -> Context | None:
    if run["output"] is None and run["output_ref"] is None:
        return None
    return context_of({**run, "output_type": "json"}, "output")


def _run_of(record: asyncpg.Record) -> int | None:
    """The run that has ended a wait, or the child flow that has ended; None for anything else."""
    if record["kind"] not in ("event", "task") or record["detail"] is None:
        return None
    found: int | None = orjson.loads(record["detail"]).get("flow")
    return found


async def _runs(batch: Batch, inbox: Sequence[asyncpg.Record]) -> dict[int, asyncpg.Record]:
    ids = [run for record in inbox if (run := _run_of(record)) is not None]
    if not ids:
        return {}
    return {record["id"]: record for record in await fetch(batch.connection, "flows.runs", ids)}


def _run_end(
    batch: Batch, record: asyncpg.Record, detail: Mapping[str, Any], run: asyncpg.Record | None
) -> Message:
    node, generation = record["node"], record["generation"]
    outcome = _OUTCOMES[detail["status"]]
    if outcome is not Outcome.SUCCEEDED:
        error = run["error"] if run is not None else None
        reason = f"flow {detail['flow']}, which it waited for, {detail['status']}: {error or 'no reason'}"
        # The cancellation of another flow is a failure of this node, and cancels nothing here.
        return Ended(node, generation, Outcome.FAILED, reason)
    # A run without an output, or whose day of history was dropped meanwhile, has none.
    if run is not None and (output := _output_of(run)) is not None:
        batch.outputs[record["flow_id"], node, generation] = output
    return Ended(node, generation, outcome)


def _event_key(record: asyncpg.Record) -> tuple[str, str]:
    detail = orjson.loads(record["detail"])
    return detail["namespace"], detail["id"]


async def _event_data(batch: Batch, inbox: Sequence[asyncpg.Record]) -> dict[tuple[str, str], Context | None]:
    keys = [_event_key(record) for record in inbox if record["kind"] == "event" and not _run_of(record)]
    if not keys:
        return {}
    found = await fetch(batch.connection, "flows.events", [key[0] for key in keys], [key[1] for key in keys])
    return {(row["namespace"], row["id"]): json_of(row, "data") for row in found}


async def _read_due(batch: Batch, due: Sequence[asyncpg.Record]) -> None:
    await batch.load_flows(record["flow_id"] for record in due)
    starts = [record for record in due if record["kind"] == Limit.START_WITHIN]
    claimed: set[tuple[int, str, int]] = set()
    if starts:
        found = await fetch(
            batch.connection,
            "flows.claimed",
            [record["flow_id"] for record in starts],
            [record["node"] for record in starts],
            [record["generation"] for record in starts],
        )
        claimed = {(row["flow_id"], row["flow_node"], row["flow_generation"]) for row in found}
    for record in due:
        flow_id, node, generation = record["flow_id"], record["node"], record["generation"]
        if flow_id not in batch.loaded:
            continue
        if record["kind"] == "timer":
            batch.add(flow_id, Ended(node, generation, Outcome.SUCCEEDED))
        elif record["kind"] != Limit.START_WITHIN or (flow_id, node, generation) not in claimed:
            batch.add(flow_id, LimitReached(node or None, generation, Limit(record["kind"])))
