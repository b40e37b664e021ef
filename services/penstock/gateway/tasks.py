"""Tasks: submitting, reading and cancelling them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import asyncpg
from aiohttp import web

from penstock import tracing
from penstock.contracts.context import INLINE_LIMIT_BYTES
from penstock.contracts.submission import Submission
from penstock.contracts.validation import parse, problems
from penstock.core.access import Grant
from penstock.core.task import State
from penstock.errors import (
    Conflict,
    Invalid,
    InvalidRecord,
    Malformed,
    NotFound,
    Throttled,
    TooLarge,
    UnknownType,
)
from penstock.gateway import views
from penstock.gateway.access import among, grant_of
from penstock.gateway.batcher import Batcher
from penstock.gateway.broker import Broker
from penstock.gateway.door import Door
from penstock.gateway.openapi import conform
from penstock.gateway.ownership import no_task, own, require_own
from penstock.gateway.settings import GatewaySettings
from penstock.http.problems import BadParameter, Faults
from penstock.http.server import (
    LARGEST_ID,
    body_of,
    choice_in_query,
    number_in_query,
    refuse_unknown_parameters,
    respond,
    text_in_query,
)
from penstock.objects import ObjectStore
from penstock.postgres import advance, tasks
from penstock.postgres.types import KnownTypes

PAGE = 50
LARGEST_PAGE = 500


async def json_of(request: web.Request, limit_bytes: int) -> Any:
    """The JSON value of a request's body.

    Raises:
        Malformed: not UTF-8, or not JSON.
        TooLarge: longer than the limit.
    """
    data = await body_of(request, limit_bytes)
    try:
        return parse(data, exact=True)
    except InvalidRecord as error:
        raise Malformed(error.reason) from error


class Tasks:
    """The routes below /tasks.

    Args:
        settings: limits.
        pool: of the database.
        types: which types there are.
        objects: for contexts above the inline limit.
        broker: publishes what cancelling owes.
        door: lets submissions in while PostgreSQL keeps up.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        types: KnownTypes,
        objects: ObjectStore,
        broker: Broker,
        door: Door,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._types = types
        self._objects = objects
        self._broker = broker
        self._door = door
        self._batcher = Batcher(pool, settings.gateway_submit_wait_s)

    def routes(self) -> list[web.RouteDef]:
        """What this class answers."""
        return [
            web.post("/tasks", self.submit),
            web.get("/tasks", self.find, allow_head=False),
            web.post("/tasks/cancel", self.cancel_many),
            web.post("/tasks/states", self.states),
            web.get("/tasks/{id:[0-9]+}", self.get, allow_head=False),
            web.post("/tasks/{id:[0-9]+}/cancel", self.cancel),
        ]

    async def submit(self, request: web.Request) -> web.Response:
        """POST /tasks: one object is one task, an array a batch that is inserted whole or not at all."""
        refuse_unknown_parameters(request)
        self._door.require_open()
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        rows = len(raw) if isinstance(raw, list) else 1
        # The body is kept by the request: this is its length, and no second reading.
        with self._door.place(rows, len(await request.read())):
            given = request.headers.get(tracing.TRACEPARENT)
            with tracing.span("submit", given, kind="server", root=True, tasks=rows) as span:
                return await self._submit(raw, grant_of(request), span.traceparent if span else None)

    async def _submit(self, raw: Any, grant: Grant, traceparent: str | None) -> web.Response:
        if isinstance(raw, list):
            submitted = await self._insert(await self._read_batch(raw, grant), traceparent)
            status = 201 if any(one.created for one in submitted) else 200
            return respond({"tasks": [{"id": s.id, "created": s.created} for s in submitted]}, status)
        [task] = await self._insert(await self._read([("", raw)], grant), traceparent)
        return respond(
            {"id": task.id, "created": task.created},
            201 if task.created else 200,
            {"Location": f"/tasks/{task.id}"},
        )

    async def _read_batch(self, raw: list[Any], grant: Grant) -> list[Submission]:
        limit = self._settings.gateway_batch_limit
        if not raw:
            raise InvalidRecord("a batch needs at least one task")
        if len(raw) > limit:
            raise TooLarge(f"{len(raw):,} tasks in one batch; {limit:,} is the limit: send several")
        return await self._read([(f"/{index}", one) for index, one in enumerate(raw)], grant)

    async def _read(self, entries: list[tuple[str, Any]], grant: Grant) -> list[Submission]:
        found: list[Submission] = []
        faults: list[Invalid] = []
        for base, raw in entries:
            try:
                found.append(Submission.from_wire(raw))
            except Invalid as error:
                # Reading stops at the first fault; whoever mends the body wants to know of all.
                found_here: Sequence[Invalid] = problems(raw, "submitted") or [error]
                faults += [_below(base, fault) for fault in found_here]
        if not faults:
            await self._know({submission.type for submission in found})
            faults = [
                UnknownType(
                    f"no task type {submission.type!r} is registered: register it with POST /types",
                    pointer=f"{base}/type",
                )
                for (base, _), submission in zip(entries, found, strict=True)
                if self._types.get(submission.type) is None or not grant.covers(submission.type)
            ]
        if faults:
            raise faults[0] if len(faults) == 1 else Faults(faults)
        return found

    async def _know(self, names: set[str]) -> None:
        wait_s = self._settings.gateway_submit_wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._types.require(names)
        except TimeoutError as error:
            raise Throttled(f"PostgreSQL is behind: no types within {wait_s:g} s") from error

    async def _insert(self, submissions: list[Submission], traceparent: str | None) -> list[tasks.Submitted]:
        if traceparent is not None:
            submissions = [dataclasses.replace(one, traceparent=traceparent) for one in submissions]
        return await self._batcher.submit([await self._checked_in(submission) for submission in submissions])

    async def _checked_in(self, submission: Submission) -> Submission:
        if submission.context.size <= INLINE_LIMIT_BYTES:
            return submission
        # Before the row: a reference in PostgreSQL always has its object.
        context = await self._objects.check_in(submission.context)
        return dataclasses.replace(submission, context=context)

    async def get(self, request: web.Request) -> web.Response:
        """GET /tasks/{id}."""
        refuse_unknown_parameters(request, "context")
        resolve = choice_in_query(request, "context", "value", ("value", "ref")) == "value"
        row = await tasks.get(self._pool, id_of(request))
        if not grant_of(request).covers(row["type"]):
            raise no_task(row["id"])
        return respond(await views.detail(row, self._objects if resolve else None))

    async def find(self, request: web.Request) -> web.Response:
        """GET /tasks: newest first, by keyset, so that pages hold still while tasks come in."""
        refuse_unknown_parameters(
            request, "type", "state", "stage", "key", "label", "idempotency_key", "limit", "cursor"
        )
        limit = number_in_query(request, "limit", PAGE, low=1, high=LARGEST_PAGE)
        before = number_in_query(request, "cursor", 0, low=1, high=LARGEST_ID)
        rows = await tasks.find(
            self._pool,
            type_name=text_in_query(request, "type"),
            states=_states_in(request),
            stage=text_in_query(request, "stage"),
            labels=_labels_in(request),
            idempotency_key=text_in_query(request, "idempotency_key"),
            key=text_in_query(request, "key"),
            before=before or None,
            limit=limit + 1,
            among=among(request),
        )
        more = len(rows) > limit
        page = rows[:limit]
        return respond(
            {
                "tasks": [views.summary(dict(row)) for row in page],
                "next": str(page[-1]["id"]) if more else None,
            }
        )

    async def states(self, request: web.Request) -> web.Response:
        """POST /tasks/states: how many of some tasks are in which state."""
        ids = await own(request, self._pool, await self._ids(request))
        return respond({"states": await tasks.states_of(self._pool, ids)})

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /tasks/{id}/cancel."""
        task_id = id_of(request)
        await require_own(request, self._pool, task_id)
        cancelled, owed = await advance.cancel(self._pool, [task_id], source=self._settings.event_source)
        self._broker.owe(owed)
        if not cancelled:
            state = (await tasks.get(self._pool, task_id))["state"]
            if state != State.CANCELLED:
                raise Conflict(f"task {task_id} has already {_ended(state)}: it can no longer be cancelled")
        return respond({"id": task_id, "state": State.CANCELLED, "cancelled": bool(cancelled)})

    async def cancel_many(self, request: web.Request) -> web.Response:
        """POST /tasks/cancel: those that are not final; tells which others had ended and which are no task's."""
        ids = await self._ids(request)
        visible = await own(request, self._pool, ids)
        cancelled, owed = await advance.cancel(self._pool, visible, source=self._settings.event_source)
        self._broker.owe(owed)
        done = set(cancelled)
        left = set(ids) - done
        ended = await tasks.known(self._pool, left & set(visible)) if left else set()
        return respond(
            {"cancelled": sorted(done), "unchanged": sorted(ended), "unknown": sorted(left - ended)}
        )

    async def _ids(self, request: web.Request) -> list[int]:
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "Ids")
        # JSON Schema counts 81.0 among the integers.
        return [int(one) for one in raw["ids"]]


def _below(base: str, fault: Invalid) -> Invalid:
    return type(fault)(fault.reason, pointer=base + fault.pointer)


def id_of(request: web.Request) -> int:
    """The task id in a request's path.

    Raises:
        NotFound: no id is as large.
    """
    text = request.match_info["id"]
    if len(text) > 19 or int(text) > LARGEST_ID:
        raise NotFound(f"there is no task {text[:40]}")
    return int(text)


def _ended(state: str) -> str:
    return {"quarantined": "been quarantined"}.get(state, state)


def _states_in(request: web.Request) -> list[str]:
    states = [word for text in request.query.getall("state", []) for word in text.split(",")]
    for word in states:
        if word not in frozenset(State):
            raise BadParameter(f"must be among: {', '.join(State)}", parameter="state")
    return states


def _labels_in(request: web.Request) -> dict[str, str]:
    labels = {}
    for text in request.query.getall("label", []):
        name, colon, value = text.partition(":")
        if not colon or not name or "\0" in text:
            raise BadParameter("must be name:value", parameter="label")
        labels[name] = value
    return labels
