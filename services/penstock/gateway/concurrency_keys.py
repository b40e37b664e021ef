"""Routes of the concurrency keys of a type: pausing, weights and limits of tenants and resources.

A key may have any characters, and proxies change the encoding of paths. So the key is in the query
of a GET and in the body of a POST.
"""

from __future__ import annotations

import asyncpg
from aiohttp import web

from penstock.gateway.bodies import read_document
from penstock.gateway.changes import observer
from penstock.gateway.paging import page_size, respond_page
from penstock.gateway.views import pick
from penstock.gateway.visibility import visible_name
from penstock.http.server import refuse_unknown_parameters, respond, text_parameter
from penstock.postgres import concurrency_keys, types
from penstock.postgres.concurrency_keys import ConcurrencyKeyChange

_COLUMNS = ("key", "paused", "weight", "max_in_flight", "in_flight", "updated_at")


class ConcurrencyKeyRoutes:
    """The routes below /types/{name}/keys.

    Args:
        pool: the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/types/{name}/keys", self.find, allow_head=False),
            web.post("/types/{name}/keys", self.change),
            web.post("/types/{name}/keys/reset", self.reset),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /types/{name}/keys: the keys with settings of their own, in the order of the keys."""
        refuse_unknown_parameters(request, "key", "limit", "cursor")
        size = page_size(request)
        name = await self._existing_type(request)
        rows = await concurrency_keys.find(
            self._pool,
            name,
            concurrency_key=text_parameter(request, "key"),
            after=text_parameter(request, "cursor") or "",
            limit=size + 1,
        )
        return respond_page("keys", rows, size, lambda row: str(row["key"]), lambda row: pick(row, _COLUMNS))

    async def change(self, request: web.Request) -> web.Response:
        """POST /types/{name}/keys: fields that the body lacks stay as they are."""
        raw = await read_document(request, "KeyChange")
        max_in_flight = raw.get("max_in_flight")
        change = ConcurrencyKeyChange(
            paused=raw.get("paused"),
            # To JSON Schema 8.0 is an integer.
            weight=int(raw["weight"]) if "weight" in raw else None,
            max_in_flight=int(max_in_flight) if max_in_flight is not None else None,
            sets_limit="max_in_flight" in raw,
        )
        row = await concurrency_keys.change(
            self._pool,
            visible_name(request, types.not_found),
            raw["key"],
            change,
            observer(request, key=raw["key"]),
        )
        return respond(pick(row, _COLUMNS))

    async def reset(self, request: web.Request) -> web.Response:
        """POST /types/{name}/keys/reset: removes the settings of a key."""
        raw = await read_document(request, "KeyReset")
        changed = await concurrency_keys.reset(
            self._pool, await self._existing_type(request), raw["key"], observer(request, key=raw["key"])
        )
        return respond({"changed": changed})

    async def _existing_type(self, request: web.Request) -> str:
        name = visible_name(request, types.not_found)
        if name not in await types.all_types(self._pool):
            raise types.not_found(name)
        return name
