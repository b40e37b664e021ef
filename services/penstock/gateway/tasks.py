"""Routes of tasks: submitting, reading and cancelling."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import asyncpg
from aiohttp import web

from penstock import tracing
from penstock.contracts.context import INLINE_LIMIT_BYTES
from penstock.contracts.parsing import parse
from penstock.contracts.submission import Submission
from penstock.contracts.validation import problems
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
from penstock.gateway.access import grant_of, visible_types
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.batcher import SubmissionBatcher
from penstock.gateway.openapi import conform
from penstock.gateway.paging import id_cursor, page_size, split_page
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.gateway.visibility import require_visible, task_not_found, visible_ids
from penstock.http.problems import BadParameter, Faults
from penstock.http.server import (
    MAX_ID,
    choice_parameter,
    read_body,
    refuse_unknown_parameters,
    respond,
    text_parameter,
)
from penstock.objects import ObjectStore
from penstock.postgres import advance, tasks
from penstock.postgres.types import TypeCache


async def read_json(request: web.Request, limit_bytes: int) -> Any:
    """The JSON value of a request's body.

    Raises:
        Malformed: the body is not JSON in UTF-8.
        TooLarge: the body is longer than the limit.
    """
    data = await read_body(request, limit_bytes)
    try:
        return parse(data, exact=True)
    except InvalidRecord as error:
        raise Malformed(error.reason) from error


class TaskRoutes:
    """The routes below /tasks.

    Args:
        settings: limits.
        pool: the database.
        types: the registered types.
        objects: stores contexts above the inline limit.
        producer: publishes the outbox entries of cancellations.
        limiter: limits submissions while PostgreSQL is behind.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        types: TypeCache,
        objects: ObjectStore,
        producer: BackgroundProducer,
        limiter: SubmissionLimiter,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._types = types
        self._objects = objects
        self._producer = producer
        self._limiter = limiter
        self._batcher = SubmissionBatcher(pool, settings.gateway_submit_wait_s)

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.post("/tasks", self.submit),
            web.get("/tasks", self.find, allow_head=False),
            web.post("/tasks/cancel", self.cancel_many),
            web.post("/tasks/states", self.states),
            web.get("/tasks/{id:[0-9]+}", self.get, allow_head=False),
            web.post("/tasks/{id:[0-9]+}/cancel", self.cancel),
        ]

    async def submit(self, request: web.Request) -> web.Response:
        """POST /tasks: an object is one task; an array is a batch, inserted whole or not at all."""
        refuse_unknown_parameters(request)
        self._limiter.require_room()
        raw = await read_json(request, self._settings.gateway_body_limit_bytes)
        rows = len(raw) if isinstance(raw, list) else 1
        # The request caches its body, so this does not read it again.
        with self._limiter.reserve(rows, len(await request.read())):
            parent = request.headers.get(tracing.TRACEPARENT)
            with tracing.span("submit", parent, kind="server", root=True, tasks=rows) as span:
                return await self._submit(raw, grant_of(request), span.traceparent if span else None)

    async def _submit(self, raw: Any, grant: Grant, traceparent: str | None) -> web.Response:
        if isinstance(raw, list):
            submitted = await self._insert(await self._read_batch(raw, grant), traceparent)
            status = 201 if any(task.created for task in submitted) else 200
            return respond({"tasks": [{"id": t.id, "created": t.created} for t in submitted]}, status)
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
            raise TooLarge(
                f"{len(raw):,} tasks in one batch, and {limit:,} are allowed: send several batches"
            )
        return await self._read([(f"/{index}", entry) for index, entry in enumerate(raw)], grant)

    async def _read(self, entries: list[tuple[str, Any]], grant: Grant) -> list[Submission]:
        submissions: list[Submission] = []
        faults: list[Invalid] = []
        for base, raw in entries:
            try:
                submissions.append(Submission.from_wire(raw))
            except Invalid as error:
                # `from_wire` stops at the first fault; the answer has all.
                entry_faults: Sequence[Invalid] = problems(raw, "submitted") or [error]
                faults += [_with_base(base, fault) for fault in entry_faults]
        if not faults:
            await self._load_types({submission.type for submission in submissions})
            faults = [
                UnknownType(
                    f"no task type {submission.type!r} is registered: register it with POST /types",
                    pointer=f"{base}/type",
                )
                for (base, _), submission in zip(entries, submissions, strict=True)
                if self._types.get(submission.type) is None or not grant.covers(submission.type)
            ]
        if faults:
            raise faults[0] if len(faults) == 1 else Faults(faults)
        return submissions

    async def _load_types(self, names: set[str]) -> None:
        wait_s = self._settings.gateway_submit_wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._types.require(names)
        except TimeoutError as error:
            raise Throttled(
                f"PostgreSQL is behind: the types could not be read within {wait_s:g} s"
            ) from error

    async def _insert(self, submissions: list[Submission], traceparent: str | None) -> list[tasks.Submitted]:
        if traceparent is not None:
            submissions = [
                dataclasses.replace(submission, traceparent=traceparent) for submission in submissions
            ]
        return await self._batcher.submit(
            [await self._store_context(submission) for submission in submissions]
        )

    async def _store_context(self, submission: Submission) -> Submission:
        if submission.context.size <= INLINE_LIMIT_BYTES:
            return submission
        # Before the row, so that each reference in PostgreSQL has its object.
        context = await self._objects.check_in(submission.context)
        return dataclasses.replace(submission, context=context)

    async def get(self, request: web.Request) -> web.Response:
        """GET /tasks/{id}."""
        refuse_unknown_parameters(request, "context")
        resolve = choice_parameter(request, "context", "value", ("value", "ref")) == "value"
        row = await tasks.get(self._pool, id_of(request))
        if not grant_of(request).covers(row["type"]):
            raise task_not_found(row["id"])
        return respond(await views.detail(row, self._objects if resolve else None))

    async def find(self, request: web.Request) -> web.Response:
        """GET /tasks: the newest first."""
        refuse_unknown_parameters(
            request, "type", "state", "stage", "key", "label", "idempotency_key", "limit", "cursor"
        )
        size = page_size(request)
        rows = await tasks.find(
            self._pool,
            type_name=text_parameter(request, "type"),
            states=_read_states(request),
            stage=text_parameter(request, "stage"),
            labels=_read_labels(request),
            idempotency_key=text_parameter(request, "idempotency_key"),
            concurrency_key=text_parameter(request, "key"),
            before_id=id_cursor(request),
            limit=size + 1,
            visible_types=visible_types(request),
        )
        page, next_cursor = split_page(rows, size, lambda row: str(row["id"]))
        return respond({"tasks": [views.summary(dict(row)) for row in page], "next": next_cursor})

    async def states(self, request: web.Request) -> web.Response:
        """POST /tasks/states: the number of tasks in each state, of the given ids."""
        ids = await visible_ids(request, self._pool, await self._read_ids(request))
        return respond({"states": await tasks.states_of(self._pool, ids)})

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /tasks/{id}/cancel."""
        task_id = id_of(request)
        await require_visible(request, self._pool, task_id)
        cancelled, outbox_entry = await advance.cancel(
            self._pool, [task_id], source=self._settings.event_source
        )
        self._producer.enqueue(outbox_entry)
        if not cancelled:
            state = (await tasks.get(self._pool, task_id))["state"]
            if state != State.CANCELLED:
                raise Conflict(
                    f"task {task_id} has already {_participle(state)}: it can no longer be cancelled"
                )
        return respond({"id": task_id, "state": State.CANCELLED, "cancelled": bool(cancelled)})

    async def cancel_many(self, request: web.Request) -> web.Response:
        """POST /tasks/cancel: answers which ids were cancelled, final or unknown."""
        ids = await self._read_ids(request)
        visible = await visible_ids(request, self._pool, ids)
        cancelled, outbox_entry = await advance.cancel(
            self._pool, visible, source=self._settings.event_source
        )
        self._producer.enqueue(outbox_entry)
        remaining = set(ids) - set(cancelled)
        ended = await tasks.existing_ids(self._pool, remaining & set(visible)) if remaining else set()
        return respond(
            {
                "cancelled": sorted(set(cancelled)),
                "unchanged": sorted(ended),
                "unknown": sorted(remaining - ended),
            }
        )

    async def _read_ids(self, request: web.Request) -> list[int]:
        raw = await read_json(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "Ids")
        # To JSON Schema 81.0 is an integer.
        return [int(task_id) for task_id in raw["ids"]]


def _with_base(base: str, fault: Invalid) -> Invalid:
    return type(fault)(fault.reason, pointer=base + fault.pointer)


def id_of(request: web.Request) -> int:
    """The task id in the path of a request.

    Raises:
        NotFound: it is larger than any id.
    """
    text = request.match_info["id"]
    if len(text) > 19 or int(text) > MAX_ID:
        raise NotFound(f"there is no task {text[:40]}")
    return int(text)


def _participle(state: str) -> str:
    return {"quarantined": "been quarantined"}.get(state, state)


def _read_states(request: web.Request) -> list[str]:
    states = [state for text in request.query.getall("state", []) for state in text.split(",")]
    for state in states:
        if state not in frozenset(State):
            raise BadParameter(f"must be of: {', '.join(State)}", parameter="state")
    return states


def _read_labels(request: web.Request) -> dict[str, str]:
    labels = {}
    for text in request.query.getall("label", []):
        name, colon, value = text.partition(":")
        if not colon or not name or "\0" in text:
            raise BadParameter("must be name:value", parameter="label")
        labels[name] = value
    return labels
