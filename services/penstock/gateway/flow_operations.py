"""Routes that steer one flow: pause, resume, cancel, recover and rerun.

What this module guarantees: a command that is answered with 202 is in the inbox of the flow's
owner, which applies it once. A recovery is first decided by the same code as in the owner, so its
refusal is answered at once. The owner decides again, because the flow may have changed meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock import tracing
from penstock.core.flow.change import differences
from penstock.core.flow.messages import Refuse
from penstock.core.flow.state import FlowStatus
from penstock.errors import Conflict, RecoveryRefused
from penstock.gateway.bodies import read_json
from penstock.gateway.changes import note
from penstock.gateway.flow_reruns import Reruns, Version
from penstock.gateway.flow_views import visible_flow
from penstock.gateway.openapi import conform
from penstock.http.server import refuse_unknown_parameters, respond
from penstock.postgres import flow_commands, flow_starts
from penstock.postgres.flow_commands import Recovery, Target
from penstock.postgres.flow_views import is_archived

_PARTICIPLES = {"pause": "paused", "resume": "resumed", "cancel": "cancelled"}

_ADVICE = {
    "cancelling": "it is being cancelled: recover it when everything in it has ended",
    "timing_out": "its time is over: recover it when everything in it has ended",
    "nothing_to_recover": "no node of it has failed: name the nodes that are to run again",
    "node_running": "{nodes} would run again and {verb} running: wait for the end, or cancel the flow first",
    "unknown_node": "its definition has no node {nodes}: correct the name",
    "node_changed": "in version {version} {differences}. What has begun is carried only if it is the same there: "
    "choose these nodes, so that they run again, or rerun the flow",
}


class FlowCommandRoutes:
    """The routes below /flows/{id} that change a flow.

    Args:
        pool: the database.
        reruns: makes the starts of reruns.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], reruns: Reruns) -> None:
        self._pool = pool
        self._reruns = reruns

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.post("/flows/{id:[0-9]+}/pause", self.pause),
            web.post("/flows/{id:[0-9]+}/resume", self.resume),
            web.post("/flows/{id:[0-9]+}/cancel", self.cancel),
            web.post("/flows/{id:[0-9]+}/recover", self.recover),
            web.post("/flows/{id:[0-9]+}/rerun", self.rerun),
        ]

    async def pause(self, request: web.Request) -> web.Response:
        """POST /flows/{id}/pause: nothing new starts, and what runs goes on to its end."""
        return await self._command(request, "pause")

    async def resume(self, request: web.Request) -> web.Response:
        """POST /flows/{id}/resume."""
        return await self._command(request, "resume")

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /flows/{id}/cancel: the flow ends when nothing in it is live."""
        return await self._command(request, "cancel")

    async def _command(self, request: web.Request, kind: str) -> web.Response:
        refuse_unknown_parameters(request)
        flow = await visible_flow(request, self._pool)
        if flow["status"] == FlowStatus.RUNNING:
            # A row may lag behind the inbox, so a command that seems to change nothing is sent too.
            await flow_commands.command(self._pool, [flow["id"]], kind)
            note(request, flow=flow["id"], command=kind)
            return respond({"id": flow["id"], "verb": kind, "accepted": True}, 202)
        if kind == "cancel" and flow["status"] == FlowStatus.CANCELLED:
            return respond({"id": flow["id"], "verb": kind, "accepted": False})
        raise Conflict(
            f"flow {flow['id']} has already ended ({flow['status']}): it can no longer be {_PARTICIPLES[kind]}"
        )

    async def recover(self, request: web.Request) -> web.Response:
        """POST /flows/{id}/recover: failed or chosen nodes, and those behind them, run again."""
        raw = await self._read(request, "FlowRecovery")
        flow = await visible_flow(request, self._pool)
        chosen = raw.get("nodes", [])
        target, found = await self._require_recoverable(flow, chosen, _version_in(raw))
        document = {
            "id": flow["id"],
            "verb": "recover",
            "accepted": not raw.get("dry_run", False),
            "generation": found.generation,
            "version": flow["version"] if target is None else target.definition["version"],
            "nodes": found.nodes,
        }
        if raw.get("dry_run"):
            return respond(document)
        detail: dict[str, Any] = {"nodes": chosen, "generation": found.generation}
        if target is not None:
            pinned = orjson.loads(flow["root_versions"]) if flow["root_versions"] else {}
            detail |= {"version": target.definition["version"], "versions": target.added(pinned)}
        await flow_commands.command(self._pool, [flow["id"]], "recover", detail)
        note(request, flow=flow["id"], command="recover", nodes=found.nodes, version=document["version"])
        return respond(document, 202)

    async def rerun(self, request: web.Request) -> web.Response:
        """POST /flows/{id}/rerun: a new flow with the same inputs, from the beginning."""
        raw = await self._read(request, "FlowRerun")
        flow = await visible_flow(request, self._pool)
        start = await self._reruns.start_of(flow, _version_in(raw), raw.get("idempotency_key"))
        parent = request.headers.get(tracing.TRACEPARENT)
        with tracing.span("rerun", parent, kind="server", root=True, flow=flow["id"]) as span:
            start = dataclasses.replace(start, traceparent=span.traceparent if span else None)
            [started] = await flow_starts.start(self._pool, [start])
        note(request, flow=started.id, rerun_of=flow["id"], version=start.version, created=started.created)
        return respond(
            {"id": started.id, "created": started.created, "version": start.version, "rerun_of": flow["id"]},
            201 if started.created else 200,
            {"Location": f"/flows/{started.id}"},
        )

    async def _read(self, request: web.Request, schema: str) -> dict[str, Any]:
        """The body of a request, which may be absent."""
        refuse_unknown_parameters(request)
        raw: dict[str, Any] = {}
        if request.can_read_body:
            raw = await read_json(request)
        conform(raw, schema)
        return raw

    async def _require_recoverable(
        self, flow: Mapping[str, Any], chosen: Sequence[str], version: Version
    ) -> tuple[Target | None, Recovery]:
        if is_archived(flow):
            raise RecoveryRefused(
                f"flow {flow['id']} has moved to history, with its tasks: rerun it", code="in_history"
            )
        if flow["task_id"] is not None:
            raise RecoveryRefused(
                f"task {flow['task_id']} waits for flow {flow['id']} and receives its end: recover the task",
                code="child_flow",
            )
        if flow["definition_json"] is None:
            raise Conflict(f"version {flow['version']} of the definition {flow['name']} has been removed")
        if flow["parent_id"] is not None and (flow["status"] != FlowStatus.RUNNING or flow["recovering"]):
            # Its parent has counted its end already.
            raise RecoveryRefused(
                f"flow {flow['id']} is a child of flow {flow['parent_id']}, which has counted its end: recover flow "
                f"{flow['root_id']}, which recovers its failed child flows in place",
                code="child_flow",
                nodes=[flow["parent_node"]],
            )
        target = await self._reruns.target_of(flow, version)
        if target is not None and flow["parent_id"] is not None:
            raise RecoveryRefused(
                f"flow {flow['id']} is a child of flow {flow['parent_id']}: its parent names its version",
                code="child_flow",
                nodes=[flow["parent_node"]],
            )
        found = await flow_commands.recovery(self._pool, flow["id"], chosen, target)
        if found.refusal is not None:
            raise _refused(flow, found.refusal, target)
        return target, found


def _version_in(raw: Mapping[str, Any]) -> Version:
    version = raw.get("version", "same")
    # To JSON Schema 2.0 is an integer.
    return int(version) if isinstance(version, float) else version


def _refused(flow: Mapping[str, Any], refusal: Refuse, target: Target | None) -> RecoveryRefused:
    nodes = ", ".join(refusal.nodes)
    values = {"nodes": nodes, "verb": "is" if len(refusal.nodes) == 1 else "are"}
    if target is not None:
        definition = orjson.loads(flow["definition_json"])
        values["version"] = target.definition["version"]
        values["differences"] = "; ".join(differences(definition, target.definition, refusal.nodes))
    advice = _ADVICE[refusal.code].format(**values)
    return RecoveryRefused(f"flow {flow['id']}: {advice}", code=refusal.code, nodes=refusal.nodes)
