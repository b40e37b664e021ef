"""The routes that submit tasks, flows and events: what HTTP adds to `penstock.submission`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import asyncpg
from aiohttp import web

from penstock import tracing
from penstock.contracts.flow_submission import EVENT_SCHEMA
from penstock.contracts.validation import problems
from penstock.errors import Invalid, InvalidRecord, Throttled
from penstock.gateway.access import grant_of
from penstock.gateway.batcher import SubmissionBatcher
from penstock.gateway.entries import EntryKind, Outcome, admitted, answer, settle
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.gateway.visibility import require_own_name
from penstock.objects import ObjectStore
from penstock.postgres.flow_definitions import DefinitionCache
from penstock.postgres.types import TypeCache
from penstock.submission import EventKind, FlowKind, SubmissionKind, TaskKind
from penstock.submission.kind import traced


@dataclass(frozen=True, slots=True)
class _Route:
    """One route: its kind of submission, the words of its answer, the batcher of its statements.

    `unique`: a name that stands twice is refused. Tasks and events are too many for this check.
    """

    kind: SubmissionKind[Any, Any, Any]
    entries: EntryKind
    batcher: SubmissionBatcher[Any, Any]
    unique: bool


class SubmissionRoutes:
    """POST /tasks, /flows and /events/{name}: an object is one entry, an array is a batch.

    Args:
        settings: limits.
        pool: the database.
        types: the registered types.
        objects: stores values above the inline limit.
        definitions: the definitions of flows.
        limiter: limits submissions while PostgreSQL is behind.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        types: TypeCache,
        objects: ObjectStore,
        definitions: DefinitionCache,
        limiter: SubmissionLimiter,
    ) -> None:
        self._limit = settings.gateway_batch_limit
        self._wait_s = settings.gateway_submit_wait_s
        self._limiter = limiter

        def route(
            kind: SubmissionKind[Any, Any, Any], noun: str, path: str | None, *, unique: bool = False
        ) -> _Route:
            entries = EntryKind(noun, f"{noun}s", kind.stored_field, path)
            return _Route(kind, entries, SubmissionBatcher(pool, self._wait_s, kind.insert), unique)

        self._tasks = route(TaskKind(types, objects), "task", "/tasks/")
        self._flows = route(FlowKind(definitions, objects), "flow", "/flows/", unique=True)
        self._events = route(EventKind(objects), "event", None)

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.post("/tasks", self.submit_tasks),
            web.post("/flows", self.start_flows),
            web.post("/events/{name}", self.send_events),
        ]

    async def submit_tasks(self, request: web.Request) -> web.Response:
        """POST /tasks."""
        return await self._submit(request, self._tasks)

    async def start_flows(self, request: web.Request) -> web.Response:
        """POST /flows."""
        return await self._submit(request, self._flows)

    async def send_events(self, request: web.Request) -> web.Response:
        """POST /events/{name}: events of one name."""
        name = request.match_info["name"]
        if faults := problems({"event": name, "id": "?"}, EVENT_SCHEMA):
            raise InvalidRecord(f"the name of the event in the path: {faults[0].reason}")
        require_own_name(grant_of(request), name, "send events")
        return await self._submit(request, self._events, partial(_named, name))

    async def _submit(
        self, request: web.Request, route: _Route, prepare: Callable[[Any], Any] = lambda entry: entry
    ) -> web.Response:
        async with admitted(request, self._limiter, unique=route.unique) as (raw, rows):
            with _span(request, route, rows) as traceparent:

                async def settled(entries: list[Any]) -> list[Outcome]:
                    return await self._settle(request, route, [*map(prepare, entries)], traceparent)

                return await answer(raw, route.entries, self._limit, settled)

    async def _settle(
        self, request: web.Request, route: _Route, entries: list[Any], traceparent: str | None
    ) -> list[Outcome]:
        kind = route.kind.open_batch()
        decoded = [kind.decode(entry) for entry in entries]
        try:
            async with asyncio.timeout(self._wait_s):
                items = await kind.admit(decoded, grant_of(request).covers)
        except TimeoutError as error:
            raise Throttled(
                f"PostgreSQL is behind: what the {route.entries.member} name could not be read "
                f"within {self._wait_s:g} s"
            ) from error
        items = [item if isinstance(item, Invalid) else traced(item, traceparent) for item in items]
        return await settle(kind, items, route.batcher.submit)


@contextmanager
def _span(request: web.Request, route: _Route, rows: int) -> Iterator[str | None]:
    """The span of a request, as `traceparent`; None if it is not sampled."""
    if route.kind.span_attribute is None:
        yield None
        return
    parent = request.headers.get(tracing.TRACEPARENT)
    attributes = {route.entries.member: rows}
    with tracing.span("submit", parent, kind="server", root=True, **attributes) as span:
        yield span.traceparent if span else None


def _named(name: str, entry: Any) -> Any:
    """An entry with the name of the path, or its fault."""
    if not isinstance(entry, dict):
        return entry
    if "event" in entry:
        return InvalidRecord("the path has the name of the event: remove the field", pointer="/event")
    return {"event": name, **entry}
