"""Reads flows for people and programs: one with its nodes, lists and items."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.core.flow.state import FlowStatus
from penstock.errors import NotFound
from penstock.postgres import flow_history
from penstock.postgres.connection import translated
from penstock.postgres.history import as_task
from penstock.postgres.queries import bound, fetch, fetchrow, fetchval

Row = asyncpg.Record

# Most rows of the history of one flow, or node, that an answer has.
MAX_HISTORY = 1_000
# Seconds of a search by an index, and of a search in parts; flows of the first part and of others.
LIST_WITHIN_S = 0.25
FIRST_PART = 1_000
ROWS_PER_PART = 20_000
# Most children of a node that one request examines.
CHILDREN_PER_PART = 5_000


async def get(executor: Any, flow_id: int) -> Mapping[str, Any]:
    """One flow, from the live tables or history, with the JSON of its definition.

    It has the columns of `penstock.flow`, and also `definition_json`, `root_versions`, `now`,
    `recovering`, and for a flow in history `nodes` and `past_nodes` (see `flow_history.get`). It is
    `recovering` if it has ended and its owner has not applied an accepted recovery yet.

    Raises:
        NotFound: no flow has this id, or its day of history was dropped.
        PostgresUnavailable: the server does not answer.
    """
    with translated():
        row = await fetchrow(executor, "flow_views.get", flow_id)
        if row is not None:
            return dict(row)
        archived = await flow_history.get(executor, flow_id)
        if archived is None:
            raise NotFound(f"there is no flow {flow_id}")
        root = archived
        if archived["root_id"] != flow_id:
            root = await flow_history.get(executor, archived["root_id"]) or archived
        own = archived["definition"]
        definition = orjson.dumps(own).decode() if own else None
        if definition is None:
            definition = await fetchval(
                executor, "flow_views.definition", archived["name"], archived["version"]
            )
    return {
        **archived,
        "recovering": False,
        "definition_json": definition,
        "now": archived["finished_at"],
        "root_versions": root["versions"],
    }


def as_recovered(flow: Mapping[str, Any]) -> Mapping[str, Any]:
    """A flow of `get` for people and programs: one that is `recovering` runs, without its old end.

    A client that has recovered a flow, and then waits for its end, must not receive the old one.
    """
    if not flow["recovering"]:
        return flow
    ended = dict.fromkeys(("stop", "error", "output", "output_ref", "finished_at"))
    return {**flow, **ended, "status": FlowStatus.RUNNING}


def is_archived(flow: Mapping[str, Any]) -> bool:
    """Whether a flow of `get` has moved to history, with its tasks."""
    return "past_nodes" in flow


async def many(executor: Any, flow_ids: Sequence[int]) -> list[Row]:
    """The rows of live flows as of `get`, by id.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    return await fetch(executor, "flow_views.many", list(flow_ids))


async def nodes(executor: Any, flow: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The rows of a flow's nodes by name, each with its task or child flow.

    Args:
        executor: a pool or a connection.
        flow: of `get`.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    if is_archived(flow):
        return await flow_history.nodes(executor, flow)
    rows = await fetch(executor, "flow_views.nodes", flow["id"])
    return {row["name"]: dict(row) for row in rows}


async def history(
    executor: Any, flow: Mapping[str, Any], node: str | None = None
) -> Sequence[Mapping[str, Any]]:
    """Nodes as they were before recoveries, the latest generation first; at most `MAX_HISTORY`.

    Args:
        executor: a pool or a connection.
        flow: of `get`.
        node: only this node; None is every node.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    if is_archived(flow):
        past = [row for row in flow["past_nodes"] if node in (None, row["name"])]
        return sorted(past, key=lambda row: (-row["flow_generation"], row["name"]))[:MAX_HISTORY]
    with translated():
        if node is None:
            rows = await fetch(executor, "flow_views.history", flow["id"], MAX_HISTORY)
        else:
            rows = await fetch(executor, "flow_views.node_history", flow["id"], node, MAX_HISTORY)
    return [dict(row) for row in rows]


# How children are read, of live flows and in history: the query, and what makes a row of one.
_Source = tuple[str, Callable[[Row], Mapping[str, Any]]]
_CHILD_TASKS: Sequence[_Source] = (
    ("flow_views.tasks_of_node", dict),
    ("history.tasks_of_node", as_task),
)
_CHILD_FLOWS: Sequence[_Source] = (
    ("flow_views.flows_of_node", dict),
    ("history.flows_of_node", flow_history.as_flow),
)


class Place(NamedTuple):
    """The place of a child among the children of a node; an item of -1 is no item."""

    item: int
    generation: int


class Children(NamedTuple):
    """A part of the children of a node.

    Attributes:
        tasks: rows of tasks, in the order of items and generations.
        flows: rows of child flows; a node has tasks or flows.
        behind: the place where the next part begins; None at the end.
    """

    tasks: list[Mapping[str, Any]]
    flows: list[Mapping[str, Any]]
    behind: Place | None


async def children(
    executor: Any,
    flow: Mapping[str, Any],
    node: str,
    *,
    are_flows: bool,
    states: Sequence[str] | None = None,
    behind: Place | None = None,
    limit: int = 50,
) -> Children:
    """The tasks or child flows of a node, in the order of their items.

    Args:
        executor: a pool or a connection.
        flow: of `get`.
        node: name of the node.
        are_flows: whether the children are flows.
        states: only children in these states; None is every state.
        behind: `behind` of the part before.
        limit: most children.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    # The root of a family moves to history before its tasks and child flows. A child that moves
    # between the two statements is in both answers.
    sources = _CHILD_FLOWS if are_flows else _CHILD_TASKS
    if not is_archived(flow):
        sources = sources[:1]
    place = behind or Place(-2, -1)
    states = list(states) if states else None
    found: dict[Place, Mapping[str, Any]] = {}
    ends: list[Place] = []
    for statement, decode in sources:
        rows = await fetch(
            executor,
            statement,
            flow_id=flow["id"],
            node=node,
            **place._asdict(),
            most_examined=CHILDREN_PER_PART,
            states=states,
            limit=limit + 1,
        )
        reached = rows[0] if rows else None
        part = [decode(row) for row in rows if row["id"] is not None]
        if len(part) > limit:
            ends.append(_place(part[limit - 1], are_flows=are_flows))
        elif reached is not None and reached["examined"] == CHILDREN_PER_PART:
            ends.append(Place(reached["reached_item"], reached["reached_generation"]))
        found |= {_place(child, are_flows=are_flows): child for child in part}
    # Behind the first end of a part its source may have more.
    places = sorted(each for each in found if not ends or each <= min(ends))
    following = min(ends, default=None)
    if len(places) > limit:
        following = places[limit - 1]
    shown = [found[each] for each in places[:limit]]
    return Children([] if are_flows else shown, shown if are_flows else [], following)


def _place(row: Mapping[str, Any], *, are_flows: bool) -> Place:
    prefix = "parent" if are_flows else "flow"
    item = row[f"{prefix}_item"]
    return Place(-1 if item is None else item, row[f"{prefix}_generation"])


class FoundFlows(NamedTuple):
    """A part of the flows that match.

    Attributes:
        rows: of these flows, newest first.
        searched_to: as in `penstock.postgres.task_search.FoundTasks`.
    """

    rows: Sequence[Mapping[str, Any]]
    searched_to: int | None = None


async def find(
    executor: Any,
    *,
    name: str | None = None,
    statuses: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    since: datetime | None = None,
    family: int | None = None,
    schedule: str | None = None,
    namespaces: Sequence[str] | None = None,
    before_id: int | None = None,
    limit: int = 50,
    within_s: float = LIST_WITHIN_S,
) -> FoundFlows:
    """Rows of flows that match all filters, newest first.

    A search that no index serves is bounded as that of `penstock.postgres.task_search.find`. Flows
    in history are found with `family` only.

    Args:
        executor: a pool or a connection.
        name: name of the definition.
        statuses: one of these states (`ShownStatus`).
        labels: labels that the flow has, with these values.
        idempotency_key: idempotency key of the start.
        since: flows that were created then or later.
        family: flows below this root flow, with itself; None is every flow without a parent.
        schedule: flows that this schedule, its backfills or reruns of its flows have started.
        namespaces: only flows of these namespaces; None is all.
        before_id: the last id of the page before.
        limit: most rows.
        within_s: see above.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    filters = {
        "name": name,
        "statuses": list(statuses) if statuses else None,
        "labels": orjson.dumps(labels).decode() if labels else None,
        "idempotency_key": idempotency_key,
        "created_since": since,
        "family": family,
        "visible": None if namespaces is None else list(namespaces),
        "schedule": schedule,
    }
    indexed = bool(labels or family or schedule or (name and (idempotency_key or statuses == ["running"])))
    found = await _find(executor, filters, before_id, limit, within_s, indexed=indexed)
    if family is None:
        return found
    # A flow that moves meanwhile is in both answers.
    rows = {row["id"]: row for row in await flow_history.list_family(executor, filters, before_id, limit)}
    rows |= {row["id"]: row for row in found.rows}
    newest = sorted(rows, reverse=True)
    if found.searched_to is not None:
        newest = [each for each in newest if each >= found.searched_to]
    return FoundFlows(
        [rows[each] for each in newest[:limit]], found.searched_to if len(newest) <= limit else None
    )


async def _find(
    executor: Any,
    filters: Mapping[str, Any],
    before_id: int | None,
    limit: int,
    within_s: float,
    *,
    indexed: bool,
) -> FoundFlows:
    rows: list[Row] = []
    with translated():
        if indexed:
            with suppress(TimeoutError):
                return _part(
                    await executor.fetch(
                        *bound("flow_views.list", **filters, before=before_id, limit=limit, first_id=None),
                        timeout=within_s,
                    )
                )
        deadline_s = time.monotonic() + within_s
        part_rows = min(FIRST_PART, ROWS_PER_PART)
        while True:
            part = await fetchrow(executor, "flow_views.walk", before_id, part_rows)
            if not part["flows"]:
                return _part(rows)
            rows += await fetch(
                executor,
                "flow_views.list",
                **filters,
                before=before_id,
                limit=limit - len(rows),
                first_id=part["last"],
            )
            before_id = part["last"]
            if len(rows) == limit or part["flows"] < part_rows:
                return _part(rows)
            if time.monotonic() >= deadline_s:
                return _part(rows, before_id)
            part_rows = ROWS_PER_PART


def _part(rows: Sequence[Row], searched_to: int | None = None) -> FoundFlows:
    return FoundFlows([dict(row) for row in rows], searched_to)
