"""Reads the facts by which `core.flow.why` explains a flow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from penstock.core.flow.plan import NodeKind
from penstock.core.flow.state import FlowStatus, NodeStatus, StopReason
from penstock.core.flow.why import COUNTED, FlowFacts, NodeFacts
from penstock.core.task import FINAL, State
from penstock.postgres import flow_history
from penstock.postgres.connection import translated
from penstock.postgres.flow_views import Row, get
from penstock.postgres.flows import SHARDS, items_of
from penstock.postgres.queries import fetch, fetchrow, fetchval

# Children of a map that are examined from each end for the one that blocks.
_ITEMS_EXAMINED = 10_000
# Child flows in each other, as validation permits them.
_MAX_DEPTH = 100

_LIVE = [*(state.value for state in State if state not in FINAL)]
_UNSUCCESSFUL = [*(state.value for state in FINAL - {State.SUCCEEDED})]


async def facts(executor: Any, flow_id: int) -> list[FlowFacts]:
    """The facts for `core.flow.why`, from the flow down to the child flow at the end of the path.

    Raises:
        NotFound: no flow has this id.
        PostgresUnavailable: the server does not answer.
    """
    levels: list[FlowFacts] = []
    next_id: int | None = flow_id
    with translated():
        while next_id is not None and len(levels) <= _MAX_DEPTH:
            row = await fetchrow(executor, "flow_views.why", next_id)
            if row is not None:
                levels.append(await _level(executor, row))
            else:
                # It has ended, and moved to history.
                levels.append(await _archived_level(executor, await get(executor, next_id)))
            node = levels[-1].node
            next_id = node.flow if node is not None else None
        return await _with_changes(executor, levels)


async def _with_changes(executor: Any, levels: Sequence[FlowFacts]) -> list[FlowFacts]:
    """The facts with those of the inboxes; a flow that a task has made is in a shard of its own."""
    found: dict[int, FlowFacts] = {}
    for shard in dict.fromkeys(level.root_id % SHARDS for level in levels):
        ours = [level for level in levels if level.root_id % SHARDS == shard]
        changes = await fetch(
            executor, "flow_views.unapplied", shard, COUNTED + 1, [level.id for level in ours]
        )
        waiting = {row["flow_id"]: row for row in changes}
        session = await fetchval(executor, "flow_views.owner", str(shard))
        owner = session.rpartition(" ")[2] if session else None
        for level in ours:
            row = waiting.get(level.id)
            found[level.id] = replace(
                level,
                owner=owner,
                unapplied=row["changes"] if row else 0,
                unapplied_since=row["since"] if row else None,
            )
    return [found[level.id] for level in levels]


async def _archived_level(executor: Any, flow: Mapping[str, Any]) -> FlowFacts:
    node = await _archived_node(executor, flow) if flow["status"] == FlowStatus.FAILED else None
    return FlowFacts(
        id=flow["id"],
        root_id=flow["root_id"],
        name=flow["name"],
        now=flow["now"],
        status=FlowStatus(flow["status"]),
        since=flow["finished_at"],
        error=flow["error"],
        node=node,
    )


async def _archived_node(executor: Any, flow: Mapping[str, Any]) -> NodeFacts | None:
    """The first failed node of a flow in history, with the task or child flow that failed."""
    nodes = await flow_history.nodes(executor, flow)
    # The nodes of history are in the order in which they started.
    row = next((row for row in nodes.values() if row["status"] == NodeStatus.FAILED), None)
    if row is None:
        return None
    definition = orjson.loads(flow["definition_json"]) if flow["definition_json"] else {"nodes": {}}
    items = items_of(row)
    item, task, state, below = None, row["task_id"], row["task_state"], row["child_id"]
    if items is not None:
        searched = {
            "flow_id": flow["id"],
            "node": row["name"],
            "states": _UNSUCCESSFUL,
            "limit": _ITEMS_EXAMINED,
        }
        # A part of its items may not have moved yet.
        sources = ("flow_views.why_item", "history.failed_item")
        failed = [each for source in sources if (each := await fetchrow(executor, source, **searched))]
        if failed:
            found = min(failed, key=lambda each: int(each["item"]))
            item, task, state, below = found["item"], found["task"], found["state"], found["flow"]
    return NodeFacts(
        name=row["name"],
        kind=NodeKind(definition["nodes"].get(row["name"], {}).get("kind", NodeKind.TASK)),
        status=NodeStatus(row["status"]),
        since=row["finished_at"],
        reason=row["reason"] or "",
        items=items,
        item=item,
        task=task,
        task_state=state if task is not None else None,
        flow=below,
    )


async def _level(executor: Any, row: Row) -> FlowFacts:
    status = FlowStatus(row["status"])
    node = failed = None
    if status is FlowStatus.RUNNING:
        node = await _node(executor, row, [NodeStatus.RUNNING])
        if row["stop"] == StopReason.FAILURE:
            failed = await _node(executor, row, [NodeStatus.FAILED])
    elif status is FlowStatus.FAILED:
        node = await _node(executor, row, [NodeStatus.FAILED])
    return FlowFacts(
        id=row["id"],
        root_id=row["root_id"],
        name=row["name"],
        now=row["now"],
        status=status,
        since=row["finished_at"] or row["updated_at"],
        paused=row["paused"],
        stop=StopReason(row["stop"]) if row["stop"] else None,
        live=row["live"],
        error=row["error"],
        node=node,
        failed=failed,
    )


async def _node(executor: Any, flow: Row, statuses: Iterable[NodeStatus]) -> NodeFacts | None:
    flow_id = flow["id"]
    row = await fetchrow(
        executor,
        "flow_views.why_node",
        flow_id=flow_id,
        statuses=[status.value for status in statuses],
        name=flow["name"],
        version=flow["version"],
    )
    if row is None:
        return None
    running = row["status"] == NodeStatus.RUNNING
    items = items_of(row)
    if items is None:
        child = await fetchrow(executor, "flow_views.why_child", flow_id, row["name"], row["generation"])
    else:
        states = _LIVE if running else _UNSUCCESSFUL
        child = await fetchrow(
            executor,
            "flow_views.why_item",
            flow_id=flow_id,
            node=row["name"],
            states=states,
            limit=_ITEMS_EXAMINED,
        )
    task, state = (child["task"], child["state"]) if child else (None, None)
    below = child["flow"] if child else None
    if task is not None and state == State.WAITING:
        below = await fetchval(executor, "flow_views.why_task", task)
    return NodeFacts(
        name=row["name"],
        # The definition is missing only if an operator has deleted it.
        kind=NodeKind(row["kind"] or NodeKind.TASK),
        status=NodeStatus(row["status"]),
        since=row["started_at"] if running else row["finished_at"],
        reason=row["reason"] or "",
        items=items,
        item=child["item"] if child else None,
        task=task,
        task_state=state,
        flow=below,
        event=row["event"],
        key=row["key"] or "",
        until=row["until"],
        finish_by=row["finish_by"],
    )
