"""Routes of bulk operations: changing tasks, and commanding or rerunning flows, by filter.

What this module guarantees: an operation that is acknowledged has a row, and runs until it has
ended or is stopped (`gateway.operation_runner`). Each task or flow that matches when its batch runs
is changed once and counted once (`penstock.postgres.operations` and `flow_operations`).
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import asyncpg
import orjson
from aiohttp import web

from penstock.core.access import Grant
from penstock.core.changes import difference
from penstock.core.flow.operations import FlowFilter, FlowVerb
from penstock.core.operations import Subject, TaskFilter, Verb
from penstock.core.task import Priority
from penstock.errors import (
    Conflict,
    InvalidRecord,
    NotFound,
    PostgresUnavailable,
)
from penstock.gateway import views
from penstock.gateway.access import grant_of
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.bodies import read_document, read_json
from penstock.gateway.changes import note
from penstock.gateway.dry_run import MAX_COUNTED, MAX_EXAMPLES
from penstock.gateway.flow_reruns import Reruns
from penstock.gateway.openapi import conform
from penstock.gateway.operation_filters import flow_filter, limit_to_visible, task_filter
from penstock.gateway.operation_runner import OperationRunner
from penstock.gateway.paging import id_cursor, page_size, respond_page
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.visibility import visible_namespaces
from penstock.http.server import (
    MAX_ID,
    choice_parameter,
    refuse_unknown_parameters,
    respond,
)
from penstock.postgres import flow_documents, flow_operations, flow_views, operations, tasks
from penstock.postgres.operations import Matches
from penstock.postgres.read_pool import reading

log = logging.getLogger(__name__)

VERBS = (*Verb, FlowVerb.RERUN)
STATES = ("running", "done", "stopped", "failed")
# Most tasks that a dry run examines; its count is a lower bound when there are more.
MAX_ROWS_EXAMINED = 1_000_000

# Most characters of namespaces in a stored id; longer lists are stored as their digest.
MAX_SCOPE_LENGTH = 200

_COLUMNS = (
    "verb",
    "subject",
    "rate",
    "version",
    "state",
    "changed",
    "stopped_by",
    "error",
    "created_at",
    "finished_at",
)


# What the audit keeps of a request.
_NOTED = ("verb", "by", "filter", "priority", "rate", "version")


class OperationRoutes:
    """The routes below /operations, and the loop that runs operations.

    Args:
        settings: limits.
        pool: the database.
        producer: publishes the outbox entries of cancellations.
        reruns: makes the starts of flows that repeat others.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: BackgroundProducer,
        reruns: Reruns,
    ) -> None:
        self._pool = pool
        self._runner = OperationRunner(settings, pool, producer, reruns)

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.post("/operations", self.create),
            web.post("/flows/operations", self.create_on_flows),
            web.get("/operations", self.find, allow_head=False),
            web.get("/operations/{id}", self.get, allow_head=False),
            web.post("/operations/{id}/stop", self.stop),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """POST /operations: a new operation has run its first batch when it is answered."""
        raw = await read_document(request, "OperationRequest")
        verb = Verb(raw["verb"])
        await limit_to_visible(request, self._pool, raw["filter"])
        filters = task_filter(raw["filter"])
        priority = _priority(raw, verb)
        if not filters.states_for(verb):
            raise InvalidRecord(f"the verb {verb} changes no task in these states", pointer="/filter/states")
        if verb is Verb.RECOVER and filters.ids is not None:
            await self._require_no_flow(filters.ids)
        if raw.get("dry_run"):
            with reading(grant_of(request).actor, lists=True):
                counted = await self._count(
                    partial(operations.find_matching, self._pool, verb, filters, priority=priority)
                )
                rows = await tasks.by_ids(self._pool, counted.example_ids)
            return _dry_run(verb, counted, [views.summary(dict(row)) for row in rows])
        return await self._begin(request, raw, verb, filters, priority=priority)

    async def create_on_flows(self, request: web.Request) -> web.Response:
        """POST /flows/operations: as `create`, for flows."""
        raw = await read_document(request, "FlowOperationRequest")
        verb = FlowVerb(raw["verb"])
        filters = flow_filter(raw["filter"])
        if verb is not FlowVerb.RERUN and "version" in raw:
            raise InvalidRecord("only the verb rerun has a version", pointer="/version")
        if not filters.statuses_for(verb):
            raise InvalidRecord(
                f"the verb {verb} changes no flow in these states", pointer="/filter/statuses"
            )
        if raw.get("dry_run"):
            namespaces = visible_namespaces(request)
            with reading(grant_of(request).actor, lists=True):
                counted = await self._count(
                    partial(flow_operations.find_matching, self._pool, verb, filters, namespaces=namespaces)
                )
                flows = await flow_views.many(self._pool, counted.example_ids)
            return _dry_run(verb, counted, [flow_documents.summary(row) for row in flows])
        version = raw.get("version", "same") if verb is FlowVerb.RERUN else None
        return await self._begin(request, raw, verb, filters, version=version)

    async def _require_no_flow(self, ids: Sequence[int]) -> None:
        found = await operations.task_in_flow(self._pool, ids)
        if found is not None:
            task_id, flow_id = found
            raise Conflict(
                f"task {task_id} belongs to flow {flow_id}, which counts its end: recover the flow "
                f"(POST /flows/{flow_id}/recover)"
            )

    async def _begin(
        self,
        request: web.Request,
        raw: dict[str, Any],
        verb: Verb | FlowVerb,
        filters: TaskFilter | FlowFilter,
        *,
        priority: int | None = None,
        version: str | None = None,
    ) -> web.Response:
        """Stores an operation, runs its first batch and answers it."""
        grant = grant_of(request)
        public_id = raw.get("id") or uuid.uuid4().hex
        filter_json = orjson.dumps(raw["filter"], option=orjson.OPT_SORT_KEYS).decode()
        for operation_id in _candidate_ids(public_id, grant):
            row = await operations.create(
                self._pool,
                operation_id,
                verb,
                raw["by"],
                filter_json,
                priority,
                raw.get("rate"),
                actor=grant.actor or None,
                namespaces=grant.namespaces,
                version=version,
            )
            created = row is not None
            row = row or await operations.get(self._pool, operation_id)
            if row is not None and _visible(row, grant):
                break
        assert row is not None
        requested = (verb, _subject(filters), raw["filter"], priority, raw.get("rate"), version)
        existing = (
            row["verb"],
            row["subject"],
            orjson.loads(row["filter"]),
            row["priority"],
            row["rate"],
            row["version"],
        )
        if not created and existing != requested:
            raise Conflict(f"operation {public_id} exists with other contents: choose another id")
        self._runner.add(operation_id, filters)
        request_of = {name: raw[name] for name in _NOTED if name in raw}
        note(request, operation=operation_id, created=created, request=request_of)
        if created:
            log.info(
                "An operation was created",
                extra={
                    "event": "operation_created",
                    "operation": operation_id,
                    "verb": verb,
                    "by": raw["by"],
                    "filter": filter_json,
                },
            )
            row = await self._run_first_batch(row)
        self._runner.wake()
        headers = {"Location": f"/operations/{public_id}"}
        return respond(_document(row, grant), 201 if created else 200, headers)

    async def _run_first_batch(self, row: asyncpg.Record) -> asyncpg.Record:
        try:
            await self._runner.run_batch(row["id"])
            return await operations.get(self._pool, row["id"]) or row
        except PostgresUnavailable as error:
            # The operation has a row, so the loop runs it later.
            log.warning(
                "The first batch of an operation is delayed",
                extra={"event": "operation_delayed", "operation": row["id"], "error": error},
            )
            return row

    async def _count(self, find: Callable[..., Awaitable[Matches]]) -> _Counted:
        counts: Counter[str] = Counter()
        example_ids: list[int] = []
        after_id, examined, ended = 0, 0, False
        while not ended and examined < MAX_ROWS_EXAMINED and counts.total() < MAX_COUNTED:
            matches = await find(after_id=after_id, last_id=MAX_ID, limit=MAX_COUNTED - counts.total())
            counts.update(matches.states.values())
            example_ids += [*matches.states][: MAX_EXAMPLES - len(example_ids)]
            after_id, ended = matches.reached_id or after_id, matches.ended
            examined += matches.examined
        return _Counted(counts, example_ids, more=not ended)

    async def find(self, request: web.Request) -> web.Response:
        """GET /operations: the latest first."""
        refuse_unknown_parameters(request, "verb", "state", "limit", "cursor")
        size = page_size(request)
        rows = await operations.find(
            self._pool,
            verb=choice_parameter(request, "verb", "", (*VERBS, "")) or None,
            state=choice_parameter(request, "state", "", (*STATES, "")) or None,
            before_seq=id_cursor(request),
            limit=size + 1,
            namespaces=grant_of(request).namespaces,
        )
        grant = grant_of(request)
        return respond_page(
            "operations", rows, size, lambda row: str(row["seq"]), lambda row: _document(row, grant)
        )

    async def get(self, request: web.Request) -> web.Response:
        """GET /operations/{id}."""
        refuse_unknown_parameters(request)
        return respond(_document(await self._row(request), grant_of(request)))

    async def stop(self, request: web.Request) -> web.Response:
        """POST /operations/{id}/stop: tasks that it has changed stay changed."""
        raw = await read_json(request)
        conform(raw, "OperationStop")
        row = await self._row(request)
        before = _document(row, grant_of(request))
        await operations.stop(self._pool, row["id"], raw["by"])
        after = _document(await self._row(request), grant_of(request))
        note(request, **difference(_state(before), _state(after)))
        return respond(after)

    async def _row(self, request: web.Request) -> asyncpg.Record:
        public_id, grant = request.match_info["id"], grant_of(request)
        # The scoped id first: it exists when the id itself belongs to another namespace.
        for operation_id in [] if "\0" in public_id else reversed(_candidate_ids(public_id, grant)):
            row = await operations.get(self._pool, operation_id)
            if row is not None and _visible(row, grant):
                return row
        raise NotFound(f"there is no operation {public_id[:80]!r}")

    async def run(self) -> None:
        """Runs the batches of all operations in turn, until cancelled."""
        await self._runner.run()


def _state(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in ("state", "stopped_by")}


class _Counted(NamedTuple):
    """The result of a dry run: the number by state, some ids, and whether there are more."""

    states: Counter[str]
    example_ids: Sequence[int]
    more: bool


def _dry_run(verb: Verb | FlowVerb, counted: _Counted, examples: Sequence[Any]) -> web.Response:
    return respond(
        {
            "dry_run": True,
            "verb": verb.value,
            "count": counted.states.total(),
            "found_in": dict(counted.states),
            "more": counted.more,
            "examples": examples,
        }
    )


def _subject(filters: TaskFilter | FlowFilter) -> Subject:
    return Subject.FLOW if isinstance(filters, FlowFilter) else Subject.TASK


def _priority(raw: dict[str, Any], verb: Verb) -> int | None:
    if (verb is Verb.REPRIORITISE) != ("priority" in raw):
        raise InvalidRecord(
            "reprioritise needs the new priority, and other verbs have none", pointer="/priority"
        )
    return int(Priority[raw["priority"]]) if "priority" in raw else None


def _visible(row: asyncpg.Record, grant: Grant) -> bool:
    if grant.namespaces is None:
        return True
    return row["namespaces"] is not None and grant.namespaces.issuperset(row["namespaces"])


def _candidate_ids(public_id: str, grant: Grant) -> Sequence[str]:
    """The ids under which an operation may be stored, in the order in which they are tried.

    An id that an operation of another namespace has is stored with the namespaces of the grant, so
    that it does not reveal the other operation. Ids in requests have no @, so the two forms never
    collide.
    """
    if grant.namespaces is None:
        return (public_id,)
    return (public_id, public_id + _scope(grant.namespaces))


def _scope(namespaces: Collection[str]) -> str:
    scope = ".".join(sorted(namespaces))
    if len(scope) > MAX_SCOPE_LENGTH:
        scope = hashlib.sha256(scope.encode()).hexdigest()
    return f"@{scope}"


def _document(row: asyncpg.Record, grant: Grant) -> dict[str, Any]:
    public_id: str = row["id"]
    if grant.namespaces is not None:
        public_id = public_id.removesuffix(_scope(grant.namespaces))
    return {
        **views.pick(row, _COLUMNS),
        "id": public_id,
        "by": row["asked_by"],
        "actor": row["actor"],
        "filter": orjson.loads(row["filter"]),
        "priority": Priority(row["priority"]).name if row["priority"] is not None else None,
        "found_in": orjson.loads(row["found_in"]),
    }
