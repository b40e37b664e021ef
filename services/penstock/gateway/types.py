"""Task types: registering and reading them, and the copy kept fresh by notification."""

from __future__ import annotations

import asyncio
import logging

import asyncpg
from aiohttp import web

from penstock.contracts.validation import conform
from penstock.errors import NotFound, PostgresUnavailable
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.tasks import json_of
from penstock.http.server import respond
from penstock.postgres import types
from penstock.postgres.session import open_session
from penstock.postgres.types import CHANNEL, KnownTypes, TaskType

log = logging.getLogger(__name__)

LISTEN_AGAIN_S = 1.0

_WHOLE = ("partitions", "lease_ms", "max_attempts", "retry_base_ms", "retry_max_ms", "max_losses")


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
        ]

    async def register(self, request: web.Request) -> web.Response:
        """POST /types: a new type, or new settings for an old one."""
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "task-type")
        # JSON Schema counts 8.0 among the integers.
        raw.update({name: int(raw[name]) for name in _WHOLE if name in raw})
        found, created = await types.register(self._pool, TaskType.from_wire(raw))
        # The notification comes too, but perhaps after this client's next request.
        self._known.outdated()
        return respond(found.shown(), 201 if created else 200, {"Location": f"/types/{found.name}"})

    async def find(self, _request: web.Request) -> web.Response:
        """GET /types."""
        found = await types.all_types(self._pool)
        return respond({"types": [one.shown() for one in found.values()]})

    async def owners(self, _request: web.Request) -> web.Response:
        """GET /owners."""
        found = await types.owners(self._pool)
        return respond({"owners": [{"type": name, "process": process} for name, process in found.items()]})

    async def get(self, request: web.Request) -> web.Response:
        """GET /types/{name}."""
        name = request.match_info["name"]
        found = (await types.all_types(self._pool)).get(name)
        if found is None:
            raise NotFound(f"there is no task type {name!r}")
        return respond(found.shown())


async def keep_fresh(settings: GatewaySettings, known: KnownTypes) -> None:
    """Marks the copy outdated whenever a type changes, until cancelled."""
    while True:
        try:
            async with open_session(settings.postgres, "gateway types") as session:
                await session.listen(CHANNEL, lambda _name: known.outdated())
                # What changed while nobody listened.
                known.outdated()
                await session.lost.wait()
        except PostgresUnavailable as error:
            log.warning("not listening for changes of types: %s", error)
        await asyncio.sleep(LISTEN_AGAIN_S)
