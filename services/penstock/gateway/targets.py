"""Targets of callbacks: their health, what they are owed, and what operators say of them.

A target is a URL, and URLs do not survive in paths: proxies decode %2F and merge slashes. So it stands in the query of a
question and in the body of a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.contracts import subscription
from penstock.errors import NotFound
from penstock.gateway.openapi import conform
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.tasks import json_of
from penstock.http.server import (
    choice_in_query,
    number_in_query,
    refuse_unknown_parameters,
    respond,
    text_in_query,
)
from penstock.postgres import targets

STATES = ("normal", "abnormal", "disabled")
PAGE = 50
# Smaller than pages of tasks: what is held for each is counted.
LARGEST_PAGE = 100
LONGEST_URL = 2048

_SAME = (
    "url",
    "state",
    "why",
    "count",
    "slow_at",
    "called_at",
    "failures",
    "rate",
    "owner",
    "changed_at",
)


class Targets:
    """The routes below /targets.

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
            web.get("/targets", self.find, allow_head=False),
            web.post("/targets/disable", self.disable),
            web.post("/targets/enable", self.enable),
            web.post("/targets/limit", self.limit),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /targets: in the order of their URLs, by keyset."""
        refuse_unknown_parameters(request, "state", "prefix", "url", "limit", "cursor")
        state = choice_in_query(request, "state", "", (*STATES, "")) or None
        limit = number_in_query(request, "limit", PAGE, low=1, high=LARGEST_PAGE)
        url = text_in_query(request, "url", longest=LONGEST_URL)
        prefix = text_in_query(request, "prefix", longest=LONGEST_URL)
        after = text_in_query(request, "cursor", longest=LONGEST_URL)
        if url is not None:
            row = await targets.get(self._pool, url)
            rows = [row] if row is not None and state in (None, row["state"]) else []
        else:
            rows = await targets.find(self._pool, state=state, prefix=prefix, after=after, limit=limit + 1)
        page = rows[:limit]
        return respond(
            {
                "targets": await self._shown(page),
                "next": page[-1]["url"] if len(rows) > limit else None,
            }
        )

    async def disable(self, request: web.Request) -> web.Response:
        """POST /targets/disable: also one that nobody has called yet."""
        raw = await self._body(request, "TargetDisable")
        changed = await targets.disable(self._pool, raw["url"], raw["why"])
        return await self._answer(raw["url"], changed=changed)

    async def enable(self, request: web.Request) -> web.Response:
        """POST /targets/enable: its health begins anew, and what was held is let go."""
        raw = await self._body(request, "TargetEnable")
        changed = await targets.enable(self._pool, raw["url"])
        return await self._answer(raw["url"], changed=changed)

    async def limit(self, request: web.Request) -> web.Response:
        """POST /targets/limit."""
        raw = await self._body(request, "TargetLimit")
        await targets.limit(self._pool, raw["url"], raw["rate"])
        return await self._answer(raw["url"], changed=True)

    async def _body(self, request: web.Request, schema: str) -> dict[str, Any]:
        refuse_unknown_parameters(request)
        raw: dict[str, Any] = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, schema)
        # A misspelt one would be disabled, and the right one go on being called.
        subscription.read([raw["url"]])
        return raw

    async def _answer(self, url: str, *, changed: bool) -> web.Response:
        row = await targets.get(self._pool, url)
        if row is None:
            raise NotFound(f"there is no target {url}: nothing was ever sent to it")
        [shown] = await self._shown([row])
        return respond({"changed": changed, "target": shown})

    async def _shown(self, rows: Sequence[asyncpg.Record]) -> list[dict[str, Any]]:
        backlog = await targets.backlog(self._pool, [row["url"] for row in rows]) if rows else {}
        return [
            {
                **{name: row[name] for name in _SAME},
                "attempts": [_attempt(one) for one in orjson.loads(row["attempts"])],
                "backlog": backlog[row["url"]],
            }
            for row in rows
        ]


def _attempt(raw: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in raw.items() if name != "at_s"}
    return {"at": datetime.fromtimestamp(raw["at_s"], UTC), **rest}
