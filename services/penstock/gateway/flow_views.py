"""Routes that show flows: lists, one with its nodes, the items of a node, and why a flow stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.contracts.context import Context
from penstock.core.access import namespace_of
from penstock.core.flow.plan import NodeKind
from penstock.core.flow.state import FlowStatus, ShownStatus
from penstock.core.flow.why import FlowFacts, followed_task, why, with_task
from penstock.core.task import State
from penstock.core.why import TaskWhy
from penstock.errors import NotFound
from penstock.gateway import views
from penstock.gateway.access import grant_of
from penstock.gateway.end_listener import EndListener
from penstock.gateway.paging import id_cursor, page_size, split_page
from penstock.gateway.tasks import id_of, read_labels, read_words
from penstock.gateway.visibility import visible_ids, visible_namespaces
from penstock.gateway.why import TaskExplainer, why_document
from penstock.http.preferences import applied, preferred_wait_s
from penstock.http.problems import BadParameter
from penstock.http.server import (
    MAX_ID,
    choice_parameter,
    integer_parameter,
    moment_parameter,
    refuse_unknown_parameters,
    respond,
    text_parameter,
)
from penstock.objects import ObjectStore
from penstock.postgres import flow_documents, flow_facts, flow_views
from penstock.postgres.flow_views import Place

# The largest value of PostgreSQL's integer.
_MAX_INTEGER = 2**31 - 1


class FlowViewRoutes:
    """The routes below /flows that change nothing.

    Args:
        pool: the database.
        objects: resolves large inputs and outputs.
        ends: wakes requests when their flows have ended.
        explainer: explains the task that blocks a flow.
    """

    def __init__(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        objects: ObjectStore,
        ends: EndListener,
        explainer: TaskExplainer,
    ) -> None:
        self._pool = pool
        self._objects = objects
        self._ends = ends
        self._explainer = explainer

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/flows", self.find, allow_head=False),
            web.get("/flows/{id:[0-9]+}", self.get, allow_head=False),
            web.get("/flows/{id:[0-9]+}/nodes/{node}", self.node, allow_head=False),
            web.get("/flows/{id:[0-9]+}/why", self.why, allow_head=False),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /flows: the newest first."""
        refuse_unknown_parameters(
            request,
            "name",
            "status",
            "label",
            "idempotency_key",
            "since",
            "family",
            "schedule",
            "limit",
            "cursor",
        )
        size = page_size(request)
        found = await flow_views.find(
            self._pool,
            name=text_parameter(request, "name"),
            statuses=read_words(request, "status", tuple(ShownStatus)),
            labels=read_labels(request),
            idempotency_key=text_parameter(request, "idempotency_key"),
            since=moment_parameter(request, "since"),
            family=integer_parameter(request, "family", 0, low=1, high=MAX_ID) or None,
            schedule=text_parameter(request, "schedule"),
            namespaces=visible_namespaces(request),
            before_id=id_cursor(request),
            limit=size + 1,
        )
        page, next_cursor = split_page(found.rows, size, lambda row: str(row["id"]))
        if found.searched_to is not None:
            next_cursor = str(found.searched_to)
        return respond({"flows": [flow_documents.summary(row) for row in page], "next": next_cursor})

    async def get(self, request: web.Request) -> web.Response:
        """GET /flows/{id}."""
        refuse_unknown_parameters(request, "context", "definition")
        resolve = choice_parameter(request, "context", "value", ("value", "ref")) == "value"
        with_definition = choice_parameter(request, "definition", "false", ("true", "false")) == "true"
        wait_s = preferred_wait_s(request)
        row = await visible_flow(request, self._pool)
        if wait_s and row["status"] == FlowStatus.RUNNING:
            await self._ends.wait([row["id"]], wait_s)
            row = await visible_flow(request, self._pool)
        nodes = await flow_views.nodes(self._pool, row)
        document = flow_documents.detail(row, nodes, await flow_views.history(self._pool, row))
        for name in ("inputs", "output"):
            document |= await self._context(row, name, row["name"], resolve=resolve)
        if with_definition:
            document["definition"] = orjson.loads(row["definition_json"]) if row["definition_json"] else None
        return respond(document, headers=applied(wait_s))

    async def node(self, request: web.Request) -> web.Response:
        """GET /flows/{id}/nodes/{node}: the node, and its tasks or child flows by item."""
        refuse_unknown_parameters(request, "state", "context", "limit", "cursor")
        size = page_size(request)
        resolve = choice_parameter(request, "context", "value", ("value", "ref")) == "value"
        flow = await visible_flow(request, self._pool)
        name = request.match_info["node"]
        definition = orjson.loads(flow["definition_json"]) if flow["definition_json"] else {"nodes": {}}
        node = definition["nodes"].get(name)
        if node is None:
            raise NotFound(f"there is no node {name[:80]!r} in flow {flow['id']} ({flow['name']})")
        row = (await flow_views.nodes(self._pool, flow)).get(name)
        document = flow_documents.node_document(name, node, row)
        document["history"] = [
            flow_documents.past(past) for past in await flow_views.history(self._pool, flow, name)
        ]
        if row is not None:
            # The output of a task, or of a child flow, is an object of its own namespace.
            source = node.get("type") or node.get("flow") or flow["name"]
            document |= await self._context(row, "output", source, resolve=resolve)
        are_flows = NodeKind.FLOW in (node["kind"], node.get("each", {}).get("kind"))
        children = await flow_views.children(
            self._pool,
            flow,
            name,
            are_flows=are_flows,
            states=read_words(request, "state", tuple(FlowStatus if are_flows else State)),
            behind=_read_place(request),
            limit=size,
        )
        following = children.behind
        return respond(
            {
                "id": flow["id"],
                "node": document,
                "children": [
                    *(_child(child, "flow") for child in children.tasks),
                    *(_child(child, "parent") for child in children.flows),
                ],
                "next": f"{following.item}.{following.generation}" if following else None,
            }
        )

    async def why(self, request: web.Request) -> web.Response:
        """GET /flows/{id}/why: the path from the flow to what blocks it."""
        refuse_unknown_parameters(request)
        flow = await visible_flow(request, self._pool)
        facts = await flow_facts.facts(self._pool, flow["id"])
        levels: Sequence[FlowFacts] = [replace(facts[0], recovering=flow["recovering"]), *facts[1:]]
        task = await self._blocking_task(request, levels)
        if task is not None:
            levels = with_task(levels, task)
        path = why(levels)
        return respond(
            {
                "id": flow["id"],
                "name": flow["name"],
                "status": flow["status"],
                "reason": path[-1].reason,
                "sentence": path[-1].sentence,
                "path": [asdict(step) for step in path],
                # A task that has ended meanwhile blocks nothing.
                "task": why_document(task) if task is not None and followed_task(levels) else None,
            }
        )

    async def _blocking_task(self, request: web.Request, levels: Sequence[FlowFacts]) -> TaskWhy | None:
        """Explains the task at the end of the path; None without one that the request may see.

        Only this one: each explanation counts tasks, and may ask Kafka.
        """
        task_id = followed_task(levels)
        if task_id is None or not await visible_ids(request, self._pool, [task_id]):
            return None
        try:
            return await self._explainer.explain(task_id)
        except NotFound:
            # It was deleted meanwhile.
            return None

    async def _context(
        self, row: Mapping[str, Any], name: str, source: str, *, resolve: bool
    ) -> dict[str, Any]:
        context: Context | None = flow_documents.context_of(row, name)
        if context is None:
            return {}
        wire = context.to_wire(name)
        if f"{name}_type" in row:
            wire[f"{name}_type"] = wire["content_type"]
        del wire["content_type"]
        if context.ref is None or not resolve:
            return wire
        del wire[f"{name}_ref"]
        return wire | await views.resolved(context, name, namespace_of(source), self._objects)


async def visible_flow(request: web.Request, pool: asyncpg.Pool[asyncpg.Record]) -> Mapping[str, Any]:
    """The flow in the path of a request (`flow_views.get`), as an accepted recovery leaves it.

    Raises:
        NotFound: there is no such flow, or the request may not see it.
        PostgresUnavailable: the database is unavailable.
    """
    flow_id = id_of(request, "flow")
    row = await flow_views.get(pool, flow_id)
    if not grant_of(request).covers(row["name"]):
        raise NotFound(f"there is no flow {flow_id}")
    return flow_views.as_recovered(row)


def _child(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    is_task = prefix == "flow"
    return {
        "item": row[f"{prefix}_item"],
        "generation": row[f"{prefix}_generation"],
        "task": views.summary(dict(row)) if is_task else None,
        "flow": None if is_task else flow_documents.summary(row),
        "logs": flow_documents.logs_path(row["id"]) if is_task else None,
    }


def _read_place(request: web.Request) -> Place | None:
    cursor = text_parameter(request, "cursor", longest=30)
    if cursor is None:
        return None
    item, dot, generation = cursor.removeprefix("-").partition(".")
    if not (dot and item.isascii() and item.isdigit() and generation.isascii() and generation.isdigit()):
        raise BadParameter("must be `next` of the page before", parameter="cursor")
    place = Place(int(item) * (-1 if cursor.startswith("-") else 1), int(generation))
    if max(abs(place.item), place.generation) > _MAX_INTEGER:
        raise BadParameter("must be `next` of the page before", parameter="cursor")
    return place
