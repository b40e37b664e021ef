"""Task types: registering and reading them, and the copy kept fresh by notification."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import asyncpg
from aiohttp import web

from penstock.contracts.validation import conform
from penstock.core.access import Action, namespace_of
from penstock.errors import Forbidden, InvalidRecord, NotFound, PostgresUnavailable, SessionLost
from penstock.gateway.access import grant_of
from penstock.gateway.openapi import conform as conform_change
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.tasks import json_of
from penstock.http.server import respond
from penstock.postgres import types
from penstock.postgres.session import Session, open_session
from penstock.postgres.types import CHANNEL, KnownTypes, TaskType

log = logging.getLogger(__name__)

LISTEN_AGAIN_S = 1.0
# How often the session that listens is asked whether its server still takes writes.
ASK_AGAIN_S = 30.0

_WHOLE = (
    "partitions",
    "lease_ms",
    "max_attempts",
    "retry_base_ms",
    "retry_max_ms",
    "max_losses",
    "max_in_flight",
    "max_per_key",
)
# What whoever operates may change: whether and how fast its tasks are released.
OPERATED = frozenset({"paused", "max_in_flight", "starts_per_s", "max_per_key"})
# What makes it another type.
_FIXED = ("name", "partitions")


class Types:
    """The routes below /types.

    Args:
        settings: limits.
        pool: of the database.
        known: the copy by which submissions are checked.
    """

    def __init__(
        self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record], known: KnownTypes
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._known = known

    def routes(self) -> list[web.RouteDef]:
        """What this class answers."""
        return [
            web.post("/types", self.register),
            web.get("/types", self.find, allow_head=False),
            web.get("/types/{name}", self.get, allow_head=False),
            web.get("/owners", self.owners, allow_head=False),
            web.patch("/types/{name}", self.change),
        ]

    async def register(self, request: web.Request) -> web.Response:
        """POST /types: a new type, or new settings for an old one."""
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        wanted = _read(raw)
        _require_namespace(request, wanted.name)
        found, created = await types.register(self._pool, wanted)
        # The notification comes too, but perhaps after this client's next request.
        self._known.outdated()
        return respond(found.shown(), 201 if created else 200, {"Location": f"/types/{found.name}"})

    async def change(self, request: web.Request) -> web.Response:
        """PATCH /types/{name}: what is left out stays as it is."""
        name = request.match_info["name"]
        _require_visible(request, name)
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform_change(raw, "TaskTypeChange")
        fixed = next((name for name in _FIXED if name in raw), None)
        if fixed is not None:
            raise InvalidRecord(f"the {fixed} of a type cannot be changed", pointer=f"/{fixed}")
        beyond = ", ".join(sorted(set(raw) - OPERATED))
        if beyond and not grant_of(request).allows(Action.CONFIGURE):
            raise Forbidden(f"to change {beyond} takes a role that may {Action.CONFIGURE}")
        found = await types.change(self._pool, name, lambda known: _read({**known.to_wire(), **raw}))
        self._known.outdated()
        return respond(found.shown())

    async def find(self, request: web.Request) -> web.Response:
        """GET /types."""
        covers = grant_of(request).covers
        found = await types.all_types(self._pool)
        return respond({"types": [one.shown() for one in found.values() if covers(one.name)]})

    async def owners(self, request: web.Request) -> web.Response:
        """GET /owners."""
        covers = grant_of(request).covers
        found = await types.owners(self._pool)
        return respond(
            {
                "owners": [
                    {"type": name, "process": process} for name, process in found.items() if covers(name)
                ]
            }
        )

    async def get(self, request: web.Request) -> web.Response:
        """GET /types/{name}."""
        name = request.match_info["name"]
        _require_visible(request, name)
        found = (await types.all_types(self._pool)).get(name)
        if found is None:
            raise NotFound(f"there is no task type {name!r}")
        return respond(found.shown())


def _require_namespace(request: web.Request, name: str) -> None:
    grant = grant_of(request)
    if not grant.covers(name):
        assert grant.namespaces is not None
        where = ", ".join(sorted(grant.namespaces)) or "no namespace"
        raise Forbidden(
            f"{name} would be in the namespace {namespace_of(name)}, and you may register types in {where}: "
            "what stands before the first -- of a type's name is its namespace"
        )


def _require_visible(request: web.Request, name: str) -> None:
    if not grant_of(request).covers(name):
        raise NotFound(f"there is no task type {name!r}")


def _read(raw: Any) -> TaskType:
    conform(raw, "task-type")
    # JSON Schema counts 8.0 among the integers.
    return TaskType.from_wire(
        {**raw, **{name: int(raw[name]) for name in _WHOLE if raw.get(name) is not None}}
    )


async def _until_lost(session: Session) -> None:
    # A server that is demoted without ending its connections says so only to who asks it something.
    while not session.lost.is_set():
        try:
            await asyncio.wait_for(session.lost.wait(), ASK_AGAIN_S)
        except TimeoutError:
            await session.fetch("history.now")
            session.ensure()


async def keep_fresh(settings: GatewaySettings, known: KnownTypes) -> None:
    """Marks the copy outdated whenever a type changes, until cancelled."""
    while True:
        try:
            async with open_session(settings.sessions, "gateway types") as session:
                await session.listen(CHANNEL, lambda _name: known.outdated())
                # What changed while nobody listened.
                known.outdated()
                await _until_lost(session)
        except (PostgresUnavailable, SessionLost) as error:
            log.warning("not listening for changes of types: %s", error)
        await asyncio.sleep(LISTEN_AGAIN_S)
