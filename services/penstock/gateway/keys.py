"""Keys of a type: pausing, weighing and limiting tenants and resources.

A key is any text, which does not survive in paths; so it stands in the query of a question and in the body of a change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg
from aiohttp import web

from penstock.errors import NotFound
from penstock.gateway.access import grant_of
from penstock.gateway.openapi import conform
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.tasks import json_of
from penstock.http.server import number_in_query, refuse_unknown_parameters, respond, text_in_query
from penstock.postgres import keys, types
from penstock.postgres.keys import KeyChange

PAGE = 50
LARGEST_PAGE = 500

_SHOWN = ("key", "paused", "weight", "max_in_flight", "in_flight", "updated_at")


class Keys:
    """The routes below /types/{name}/keys.

    Args:
        settings: limits.
        pool: of the database.
    """

    def __init__(self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._settings = settings
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """What this class answers."""
        return [
            web.get("/types/{name}/keys", self.find, allow_head=False),
            web.post("/types/{name}/keys", self.change),
            web.post("/types/{name}/keys/reset", self.reset),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /types/{name}/keys: those of which something was said, by key."""
        refuse_unknown_parameters(request, "key", "limit", "cursor")
        limit = number_in_query(request, "limit", PAGE, low=1, high=LARGEST_PAGE)
        name = await self._type_of(request)
        rows = await keys.find(
            self._pool,
            name,
            key=text_in_query(request, "key"),
            after=text_in_query(request, "cursor") or "",
            limit=limit + 1,
        )
        page = rows[:limit]
        return respond(
            {
                "keys": [_shown(row) for row in page],
                "next": page[-1]["key"] if len(rows) > limit else None,
            }
        )

    async def change(self, request: web.Request) -> web.Response:
        """POST /types/{name}/keys: what is left out stays as it is."""
        raw = await self._body(request, "KeyChange")
        most = raw.get("max_in_flight")
        wanted = KeyChange(
            paused=raw.get("paused"),
            # JSON Schema counts 8.0 among the integers.
            weight=int(raw["weight"]) if "weight" in raw else None,
            max_in_flight=int(most) if most is not None else None,
            limits="max_in_flight" in raw,
        )
        row = await keys.change(self._pool, _visible(request), raw["key"], wanted)
        return respond(_shown(row))

    async def reset(self, request: web.Request) -> web.Response:
        """POST /types/{name}/keys/reset: nothing is said of the key any more."""
        raw = await self._body(request, "KeyReset")
        changed = await keys.reset(self._pool, await self._type_of(request), raw["key"])
        return respond({"changed": changed})

    async def _body(self, request: web.Request, schema: str) -> dict[str, Any]:
        refuse_unknown_parameters(request)
        raw: dict[str, Any] = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, schema)
        return raw

    async def _type_of(self, request: web.Request) -> str:
        name = _visible(request)
        if name not in await types.all_types(self._pool):
            raise NotFound(f"there is no task type {name!r}")
        return name


def _visible(request: web.Request) -> str:
    name = request.match_info["name"]
    if not grant_of(request).covers(name):
        raise NotFound(f"there is no task type {name!r}")
    return name


def _shown(row: Mapping[str, Any] | asyncpg.Record) -> dict[str, Any]:
    return {name: row[name] for name in _SHOWN}
