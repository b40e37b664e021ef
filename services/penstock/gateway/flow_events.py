"""The route that takes events for flows."""

from __future__ import annotations

import dataclasses
from typing import Any

import asyncpg
from aiohttp import web

from penstock.contracts.flow_submission import EVENT_SCHEMA, FlowEvent
from penstock.contracts.validation import problems
from penstock.core.access import namespace_of
from penstock.errors import Invalid, InvalidRecord
from penstock.gateway.access import grant_of
from penstock.gateway.batcher import SubmissionBatcher
from penstock.gateway.entries import EntryKind, Outcome, admitted, answer, read_entry, settle
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.gateway.visibility import require_own_name
from penstock.objects import ObjectStore
from penstock.postgres import flow_events
from penstock.postgres.flow_events import Delivered

_ENTRIES = EntryKind(noun="event", member="events", stored_field="data", path=None)


class FlowEventRoutes:
    """The route that takes events for flows.

    Args:
        settings: limits.
        pool: the database.
        objects: stores data above the inline limit.
        limiter: limits submissions while PostgreSQL is behind.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        objects: ObjectStore,
        limiter: SubmissionLimiter,
    ) -> None:
        self._settings = settings
        self._objects = objects
        self._limiter = limiter
        self._batcher: SubmissionBatcher[FlowEvent, Delivered] = SubmissionBatcher(
            pool, settings.gateway_submit_wait_s, flow_events.deliver
        )

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.post("/events/{name}", self.send)]

    async def send(self, request: web.Request) -> web.Response:
        """POST /events/{name}: an object is one event; an array is a batch of events of a name."""
        name = request.match_info["name"]
        _require_name(request, name)
        async with admitted(request, self._limiter) as (raw, _rows):
            return await answer(
                raw, _ENTRIES, self._settings.gateway_batch_limit, lambda entries: self._settle(entries, name)
            )

    async def _settle(self, entries: list[tuple[str, Any]], name: str) -> list[Outcome]:
        read = [_read_entry(base, raw, name) for base, raw in entries]
        return await settle(entries, read, self._store, self._batcher.submit)

    async def _store(self, event: FlowEvent) -> FlowEvent:
        if event.data is None:
            return event
        # Before the row, so that each reference in PostgreSQL has its object.
        return dataclasses.replace(
            event, data=await self._objects.check_in(event.data, namespace_of(event.event))
        )


def _require_name(request: web.Request, name: str) -> None:
    if faults := problems({"event": name, "id": "?"}, EVENT_SCHEMA):
        raise InvalidRecord(f"the name of the event in the path: {faults[0].reason}")
    require_own_name(grant_of(request), name, "send events")


def _read_entry(base: str, raw: Any, name: str) -> FlowEvent | Invalid:
    """An event, or all its faults, whose pointers begin with `base`."""
    if isinstance(raw, dict) and "event" in raw:
        return InvalidRecord("the path has the name of the event: remove the field", pointer=f"{base}/event")
    whole = {"event": name, **raw} if isinstance(raw, dict) else raw
    return read_entry(base, whole, FlowEvent.from_wire, EVENT_SCHEMA)
