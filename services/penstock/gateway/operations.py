"""Bulk operations: cancelling, pausing, resuming, re-prioritising and recovering tasks by filter.

What this module guarantees: an operation that `POST /operations` acknowledges has a row, and runs
until it has ended or is stopped. After a crash another gateway continues it. Each task that matches
when its batch runs is changed once and counted once (`penstock.postgres.operations`). Operations
wait while PostgreSQL is unavailable. An error that PostgreSQL would repeat ends the operation,
which then has the error.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.core.access import Grant
from penstock.core.operations import TaskFilter, Verb
from penstock.core.task import Priority, State
from penstock.errors import Conflict, InvalidRecord, NotFound, PostgresUnavailable, ValueRefused
from penstock.gateway import views
from penstock.gateway.access import grant_of
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.bodies import read_json
from penstock.gateway.dry_run import MAX_COUNTED, MAX_EXAMPLES, timestamp_in
from penstock.gateway.openapi import conform
from penstock.gateway.paging import id_cursor, page_size, split_page
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.visibility import visible_ids
from penstock.http.server import (
    MAX_ID,
    choice_parameter,
    refuse_unknown_parameters,
    respond,
)
from penstock.postgres import operations, tasks

log = logging.getLogger(__name__)

STATES = ("running", "done", "stopped", "failed")
# Most tasks that a dry run examines; its count is a lower bound when there are more.
MAX_ROWS_EXAMINED = 1_000_000
# How often a gateway looks for operations that another gateway has left.
ADOPT_INTERVAL_S = 10.0
RETRY_S = 1.0
# Longest sleep until the next batch of an operation.
MAX_DUE_SLEEP_S = 5.0

# Most characters of namespaces in a stored id; longer lists are stored as their digest.
MAX_SCOPE_LENGTH = 200

# The id of no task, for a filter that must match nothing.
NO_TASK_ID = MAX_ID

_COLUMNS = ("verb", "rate", "state", "changed", "stopped_by", "error", "created_at", "finished_at")


class OperationRoutes:
    """The routes below /operations, and the loop that runs operations.

    Args:
        settings: limits.
        pool: the database.
        producer: publishes the outbox entries of cancellations.
    """

    def __init__(
        self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record], producer: BackgroundProducer
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._producer = producer
        # By id: when the next batch is due, on the loop's clock.
        self._due: dict[str, float] = {}
        self._filters: dict[str, TaskFilter] = {}
        self._woken = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.post("/operations", self.create),
            web.get("/operations", self.find, allow_head=False),
            web.get("/operations/{id}", self.get, allow_head=False),
            web.post("/operations/{id}/stop", self.stop),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """POST /operations: a new operation has run its first batch when it is answered."""
        refuse_unknown_parameters(request)
        raw = await read_json(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "OperationRequest")
        verb = Verb(raw["verb"])
        await self._limit_to_visible(request, raw["filter"])
        filters = task_filter(raw["filter"])
        priority = _priority(raw, verb)
        if not filters.states_for(verb):
            raise InvalidRecord(f"the verb {verb} changes no task in these states", pointer="/filter/states")
        if raw.get("dry_run"):
            return respond(await self._dry_run(verb, filters, priority))
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
            )
            created = row is not None
            row = row or await operations.get(self._pool, operation_id)
            if row is not None and _visible(row, grant):
                break
        assert row is not None
        requested = (verb.value, raw["filter"], priority, raw.get("rate"))
        existing = (row["verb"], orjson.loads(row["filter"]), row["priority"], row["rate"])
        if not created and existing != requested:
            raise Conflict(f"operation {public_id} exists with other contents: choose another id")
        self._filters[operation_id] = filters
        self._due[operation_id] = 0.0
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
        self._woken.set()
        headers = {"Location": f"/operations/{public_id}"}
        return respond(_document(row, grant), 201 if created else 200, headers)

    async def _run_first_batch(self, row: asyncpg.Record) -> asyncpg.Record:
        try:
            await self._run_batch(row["id"])
            return await operations.get(self._pool, row["id"]) or row
        except PostgresUnavailable as error:
            # The operation has a row, so the loop runs it later.
            log.warning(
                "The first batch of an operation is delayed",
                extra={"event": "operation_delayed", "operation": row["id"], "error": error},
            )
            return row

    async def _dry_run(self, verb: Verb, filters: TaskFilter, priority: int | None) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        example_ids: list[int] = []
        after_id, examined, ended = 0, 0, False
        while not ended and examined < MAX_ROWS_EXAMINED and counts.total() < MAX_COUNTED:
            matches = await operations.find_matching(
                self._pool,
                verb,
                filters,
                after_id=after_id,
                last_id=MAX_ID,
                limit=MAX_COUNTED - counts.total(),
                priority=priority,
            )
            counts.update(matches.states.values())
            example_ids += [*matches.states][: MAX_EXAMPLES - len(example_ids)]
            after_id, ended = matches.reached_id or after_id, matches.ended
            examined += matches.examined
        rows = await tasks.by_ids(self._pool, example_ids)
        return {
            "dry_run": True,
            "verb": verb.value,
            "count": counts.total(),
            "found_in": dict(counts),
            "more": not ended,
            "examples": [views.summary(dict(row)) for row in rows],
        }

    async def find(self, request: web.Request) -> web.Response:
        """GET /operations: the latest first."""
        refuse_unknown_parameters(request, "verb", "state", "limit", "cursor")
        size = page_size(request)
        rows = await operations.find(
            self._pool,
            verb=choice_parameter(request, "verb", "", (*Verb, "")) or None,
            state=choice_parameter(request, "state", "", (*STATES, "")) or None,
            before_seq=id_cursor(request),
            limit=size + 1,
            namespaces=grant_of(request).namespaces,
        )
        page, next_cursor = split_page(rows, size, lambda row: str(row["seq"]))
        return respond(
            {"operations": [_document(row, grant_of(request)) for row in page], "next": next_cursor}
        )

    async def get(self, request: web.Request) -> web.Response:
        """GET /operations/{id}."""
        refuse_unknown_parameters(request)
        return respond(_document(await self._row(request), grant_of(request)))

    async def stop(self, request: web.Request) -> web.Response:
        """POST /operations/{id}/stop: tasks that it has changed stay changed."""
        raw = await read_json(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "OperationStop")
        row = await self._row(request)
        await operations.stop(self._pool, row["id"], raw["by"])
        return respond(_document(await self._row(request), grant_of(request)))

    async def _row(self, request: web.Request) -> asyncpg.Record:
        public_id, grant = request.match_info["id"], grant_of(request)
        # The scoped id first: it exists when the id itself belongs to another namespace.
        for operation_id in [] if "\0" in public_id else reversed(_candidate_ids(public_id, grant)):
            row = await operations.get(self._pool, operation_id)
            if row is not None and _visible(row, grant):
                return row
        raise NotFound(f"there is no operation {public_id[:80]!r}")

    async def _limit_to_visible(self, request: web.Request, raw: dict[str, Any]) -> None:
        """Changes a filter so that it matches only tasks that the request may see.

        The stored filter has the limit, so gateways of an earlier version, which may continue the
        operation, respect it. Checking once is enough, since the type of a task never changes.
        """
        grant = grant_of(request)
        if grant.namespaces is None:
            return
        if "type" in raw:
            if not grant.covers(raw["type"]):
                # Matches nothing, like a type that does not exist.
                raw["ids"] = [NO_TASK_ID]
        elif "ids" in raw:
            ids = sorted({int(task_id) for task_id in raw["ids"]})
            visible = await visible_ids(request, self._pool, ids)
            raw["ids"] = list(visible) or [NO_TASK_ID]
        else:
            raise InvalidRecord(
                "give a type or ids: you may change tasks of some namespaces only", pointer="/filter"
            )

    async def run(self) -> None:
        """Runs the batches of all operations in turn, until cancelled."""
        loop = asyncio.get_running_loop()
        adopt_at = 0.0
        while True:
            self._woken.clear()
            try:
                if loop.time() >= adopt_at:
                    await self._adopt()
                    adopt_at = loop.time() + ADOPT_INTERVAL_S
                for operation_id, due in [*self._due.items()]:
                    if due <= loop.time():
                        await self._run_batch(operation_id)
            except PostgresUnavailable as error:
                # A batch is one transaction, so the row of the operation has its exact progress.
                log.warning(
                    "Operations are delayed; trying again",
                    extra={"event": "operations_delayed", "error": error},
                )
                await asyncio.sleep(RETRY_S)
                continue
            next_at = min([adopt_at, *self._due.values()])
            try:
                await asyncio.wait_for(self._woken.wait(), max(0.0, next_at - loop.time()))
            except TimeoutError:
                continue

    async def _adopt(self) -> None:
        while running_ids := await operations.running_ids(self._pool, [*self._due]):
            for operation_id in running_ids:
                row = await operations.get(self._pool, operation_id)
                assert row is not None
                log.info(
                    "Continuing an operation",
                    extra={"event": "operation_adopted", "operation": operation_id, "verb": row["verb"]},
                )
                self._filters[operation_id] = task_filter(orjson.loads(row["filter"]))
                self._due[operation_id] = 0.0

    async def _run_batch(self, operation_id: str) -> None:
        loop = asyncio.get_running_loop()
        filters = self._filters.get(operation_id)
        if filters is None:
            # The loop and the creating request may run the same operation; the other one has ended
            # it.
            self._due.pop(operation_id, None)
            return
        try:
            result = await operations.run_batch(
                self._pool, operation_id, filters, source=self._settings.event_source
            )
        except (asyncpg.PostgresError, ValueRefused) as error:
            # Temporary errors are `PostgresUnavailable`; this one would repeat with each batch.
            log.exception(
                "An operation failed", extra={"event": "operation_failed", "operation": operation_id}
            )
            await operations.fail(self._pool, operation_id, f"{type(error).__name__}: {error}")
            wait_s = None
        else:
            self._producer.enqueue(result.outbox_entry)
            wait_s = result.wait_s
        if wait_s is None:
            self._due.pop(operation_id, None)
            self._filters.pop(operation_id, None)
        else:
            # Bounded: the database's clock, by which it waits, may be corrected meanwhile.
            self._due[operation_id] = loop.time() + min(wait_s, MAX_DUE_SLEEP_S)


def task_filter(raw: dict[str, Any]) -> TaskFilter:
    """Converts a filter that conforms to its schema.

    Raises:
        InvalidRecord: a date in it does not exist.
    """

    def timestamp(name: str) -> datetime | None:
        return timestamp_in(raw, name, "/filter")

    return TaskFilter(
        # To JSON Schema 81.0 is an integer.
        ids=sorted({int(task_id) for task_id in raw["ids"]}) if "ids" in raw else None,
        type=raw.get("type"),
        stage=raw.get("stage"),
        states=[State(state) for state in raw["states"]] if "states" in raw else None,
        key=raw.get("key"),
        labels=raw.get("labels"),
        priorities=[int(Priority[name]) for name in raw["priorities"]] if "priorities" in raw else None,
        created_since=timestamp("created_since"),
        created_until=timestamp("created_until"),
        finished_since=timestamp("finished_since"),
        finished_until=timestamp("finished_until"),
        error=raw.get("error"),
    )


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
