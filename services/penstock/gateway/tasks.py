"""Routes of tasks: submitting, reading and cancelling."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import asyncpg
from aiohttp import web

from penstock import tracing
from penstock.contracts.context import INLINE_LIMIT_BYTES
from penstock.contracts.parsing import Unreadable
from penstock.contracts.submission import Submission
from penstock.contracts.validation import problems
from penstock.core.access import Grant, namespace_of
from penstock.core.task import State
from penstock.errors import (
    Conflict,
    Invalid,
    InvalidRecord,
    NotFound,
    Throttled,
    TooLarge,
    UnknownType,
    ValueRefused,
)
from penstock.gateway import views
from penstock.gateway.access import grant_of, visible_types
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.batcher import SubmissionBatcher
from penstock.gateway.bodies import read_entries, read_ids
from penstock.gateway.paging import id_cursor, page_size, split_page
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.gateway.visibility import require_visible, task_not_found, visible_ids
from penstock.http.problems import BadParameter, Faults, relocated
from penstock.http.server import (
    MAX_ID,
    choice_parameter,
    refuse_unknown_parameters,
    respond,
    text_parameter,
)
from penstock.objects import ObjectStore
from penstock.postgres import advance, tasks
from penstock.postgres.types import TypeCache


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
        """POST /tasks: an object is one task; an array is a batch, whose tasks are judged alone."""
        refuse_unknown_parameters(request)
        self._limiter.require_room()
        raw = await read_entries(request, self._settings.gateway_body_limit_bytes, "")
        rows = len(raw) if isinstance(raw, list) else 1
        # The request caches its body, so this does not read it again.
        with self._limiter.reserve(rows, len(await request.read())):
            parent = request.headers.get(tracing.TRACEPARENT)
            with tracing.span("submit", parent, kind="server", root=True, tasks=rows) as span:
                return await self._submit(raw, grant_of(request), span.traceparent if span else None)

    async def _submit(self, raw: Any, grant: Grant, traceparent: str | None) -> web.Response:
        if not isinstance(raw, list):
            [task] = await self._settle([("", raw)], grant, traceparent)
            if isinstance(task, Invalid):
                raise task
            return respond(
                {"id": task.id, "created": task.created},
                201 if task.created else 200,
                {"Location": f"/tasks/{task.id}"},
            )
        self._require_batch(raw)
        entries = [(f"/{index}", entry) for index, entry in enumerate(raw)]
        outcomes = await self._settle(entries, grant, traceparent)
        faults = _faults_of(outcomes)
        if all(isinstance(outcome, Invalid) for outcome in outcomes):
            raise faults[0] if len(faults) == 1 else Faults(faults)
        status = 200
        if faults:
            status = HTTPStatus.MULTI_STATUS
        elif any(isinstance(outcome, tasks.Submitted) and outcome.created for outcome in outcomes):
            status = 201
        return respond({"tasks": [_outcome_document(outcome) for outcome in outcomes]}, status)

    def _require_batch(self, raw: list[Any]) -> None:
        limit = self._settings.gateway_batch_limit
        if not raw:
            raise InvalidRecord("a batch needs at least one task")
        if len(raw) > limit:
            raise TooLarge(
                f"{len(raw):,} tasks in one batch, and {limit:,} are allowed: send several batches"
            )

    async def _read(self, entries: list[tuple[str, Any]], grant: Grant) -> list[Submission | Invalid]:
        """The submission of each entry, or its faults, whose pointers begin with its place."""
        outcomes = [_read_entry(base, raw) for base, raw in entries]
        names = {outcome.type for outcome in outcomes if isinstance(outcome, Submission)}
        if names:
            await self._load_types(names)
        for index, (base, _) in enumerate(entries):
            submission = outcomes[index]
            if isinstance(submission, Submission) and (
                self._types.get(submission.type) is None or not grant.covers(submission.type)
            ):
                outcomes[index] = UnknownType(
                    f"no task type {submission.type!r} is registered: register it with POST /types",
                    pointer=f"{base}/type",
                )
        return outcomes

    async def _load_types(self, names: set[str]) -> None:
        wait_s = self._settings.gateway_submit_wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._types.require(names)
        except TimeoutError as error:
            raise Throttled(
                f"PostgreSQL is behind: the types could not be read within {wait_s:g} s"
            ) from error

    async def _settle(
        self, entries: list[tuple[str, Any]], grant: Grant, traceparent: str | None
    ) -> list[tasks.Submitted | Invalid]:
        """Inserts the entries that can be read; returns the task of each entry, or its fault."""
        read = await self._read(entries, grant)
        submissions = {i: outcome for i, outcome in enumerate(read) if isinstance(outcome, Submission)}
        settled: dict[int, tasks.Submitted | Invalid] = {
            i: outcome for i, outcome in enumerate(read) if isinstance(outcome, Invalid)
        }
        inserted = await self._insert([*submissions.values()], traceparent)
        for i, outcome in zip(submissions, inserted, strict=True):
            settled[i] = _with_base(entries[i][0], outcome) if isinstance(outcome, Invalid) else outcome
        return [settled[i] for i in range(len(entries))]

    async def _insert(
        self, submissions: list[Submission], traceparent: str | None
    ) -> list[tasks.Submitted | ValueRefused]:
        if traceparent is not None:
            submissions = [
                dataclasses.replace(submission, traceparent=traceparent) for submission in submissions
            ]
        if not submissions:
            return []
        return await self._batcher.submit(
            [await self._store_context(submission) for submission in submissions]
        )

    async def _store_context(self, submission: Submission) -> Submission:
        if submission.context.size <= INLINE_LIMIT_BYTES:
            return submission
        # Before the row, so that each reference in PostgreSQL has its object.
        context = await self._objects.check_in(submission.context, namespace_of(submission.type))
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
        found = await tasks.find(
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
        page, next_cursor = split_page(found.rows, size, lambda row: str(row["id"]))
        if found.searched_to is not None:
            next_cursor = str(found.searched_to)
        return respond({"tasks": [views.summary(dict(row)) for row in page], "next": next_cursor})

    async def states(self, request: web.Request) -> web.Response:
        """POST /tasks/states: how many of the given ids are in each state; the unknown ids."""
        ids, rejected = await read_ids(request, self._settings.gateway_body_limit_bytes)
        visible = await visible_ids(request, self._pool, ids)
        states = await tasks.states_of(self._pool, visible)
        unknown: set[int] = set()
        if sum(states.values()) < len(set(ids)):
            unknown = set(ids) - await tasks.existing_ids(self._pool, visible)
        return respond({"states": states, "unknown": sorted(unknown), **rejected})

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
        ids, rejected = await read_ids(request, self._settings.gateway_body_limit_bytes)
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
                **rejected,
            }
        )


def _read_entry(base: str, raw: Any) -> Submission | Invalid:
    """A submission, or all its faults, whose pointers begin with `base`."""
    if isinstance(raw, Unreadable):
        return InvalidRecord(raw.fault.reason, pointer=base)
    try:
        return Submission.from_wire(raw)
    except Invalid as error:
        # `from_wire` stops at the first fault; the answer has all.
        found: Sequence[Invalid] = problems(raw, "submitted") or [error]
        faults = [_with_base(base, fault) for fault in found]
        return faults[0] if len(faults) == 1 else Faults(faults)


def _faults_of(outcomes: Iterable[object]) -> list[Invalid]:
    found = [outcome for outcome in outcomes if isinstance(outcome, Invalid)]
    return [fault for each in found for fault in (each.faults if isinstance(each, Faults) else [each])]


def _outcome_document(outcome: tasks.Submitted | Invalid) -> dict[str, Any]:
    if isinstance(outcome, tasks.Submitted):
        return {"id": outcome.id, "created": outcome.created}
    return {"errors": [{"pointer": fault.pointer, "detail": fault.reason} for fault in _faults_of([outcome])]}


def _with_base(base: str, fault: Invalid) -> Invalid:
    return relocated(fault, lambda pointer: base + pointer)


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
