"""Targets of callbacks: their health, what they are owed, and what operators say of them.

A target is an address as one namespace calls it. URLs do not survive in paths: proxies decode %2F and merge slashes. So they
stand in the query of a question and in the body of a change. Who is confined to namespaces sees and changes their targets only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.contracts import subscription
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.core.target import TargetId
from penstock.errors import NotFound
from penstock.gateway.openapi import conform
from penstock.gateway.ownership import LONGEST_NAMESPACE, namespaces_seen, own_target
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
from penstock.postgres.types import KnownTypes

STATES = ("normal", "abnormal", "disabled")
PAGE = 50
# Smaller than pages of tasks: what is held for each is counted.
LARGEST_PAGE = 100
LONGEST_URL = 2048

_SAME = (
    "namespace",
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
        known: which types, and so which namespaces, there are.
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
            web.get("/targets", self.find, allow_head=False),
            web.post("/targets/disable", self.disable),
            web.post("/targets/enable", self.enable),
            web.post("/targets/limit", self.limit),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /targets: in the order of their URLs and then their namespaces, by keyset."""
        refuse_unknown_parameters(request, "state", "prefix", "url", "namespace", "limit", "cursor")
        state = choice_in_query(request, "state", "", (*STATES, "")) or None
        limit = number_in_query(request, "limit", PAGE, low=1, high=LARGEST_PAGE)
        url = text_in_query(request, "url", longest=LONGEST_URL)
        prefix = text_in_query(request, "prefix", longest=LONGEST_URL)
        asked = text_in_query(request, "namespace", longest=LONGEST_NAMESPACE)
        namespaces = namespaces_seen(request, asked)
        after = _after(text_in_query(request, "cursor", longest=LONGEST_URL + 1 + LONGEST_NAMESPACE))
        if url is not None:
            found = await targets.get(self._pool, url, namespaces)
            rows = [
                row
                for row in found
                if state in (None, row["state"])
                and (after is None or targets.target_in(row)[::-1] > after[::-1])
            ]
        else:
            rows = await targets.find(
                self._pool, state=state, prefix=prefix, after=after, limit=limit + 1, namespaces=namespaces
            )
        page = rows[:limit]
        return respond(
            {
                "targets": await self._shown(page),
                "next": _cursor(targets.target_in(page[-1])) if len(rows) > limit else None,
            }
        )

    async def disable(self, request: web.Request) -> web.Response:
        """POST /targets/disable: also one that nobody has called yet."""
        raw, target = await self._body(request, "TargetDisable")
        changed = await targets.disable(self._pool, target, raw["why"])
        return await self._answer(target, changed=changed)

    async def enable(self, request: web.Request) -> web.Response:
        """POST /targets/enable: its health begins anew, and what was held is let go."""
        _raw, target = await self._body(request, "TargetEnable")
        changed = await targets.enable(self._pool, target)
        return await self._answer(target, changed=changed)

    async def limit(self, request: web.Request) -> web.Response:
        """POST /targets/limit."""
        raw, target = await self._body(request, "TargetLimit")
        await targets.limit(self._pool, target, raw["rate"])
        return await self._answer(target, changed=True)

    async def _body(self, request: web.Request, schema: str) -> tuple[dict[str, Any], TargetId]:
        refuse_unknown_parameters(request)
        raw: dict[str, Any] = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, schema)
        # A misspelt one would be disabled, and the right one go on being called.
        subscription.read_one(raw["url"], "/url")
        return raw, await own_target(request, self._pool, self._known, raw["url"], raw.get("namespace"))

    async def _answer(self, target: TargetId, *, changed: bool) -> web.Response:
        rows = await targets.get(self._pool, target.url, [target.namespace])
        if not rows:
            raise NotFound(f"there is no target {target}: nothing was ever sent to it")
        [shown] = await self._shown(rows)
        return respond({"changed": changed, "target": shown})

    async def _shown(self, rows: Sequence[asyncpg.Record]) -> list[dict[str, Any]]:
        shown = [targets.target_in(row) for row in rows]
        backlog = await targets.backlog(self._pool, shown) if rows else {}
        return [
            {
                **{name: row[name] for name in _SAME},
                "attempts": [_attempt(one) for one in orjson.loads(row["attempts"])],
                "backlog": backlog[target],
            }
            for row, target in zip(rows, shown, strict=True)
        ]


def _cursor(last: TargetId) -> str:
    """A place between two targets: the URL, and behind a blank, which no URL has, the namespace unless it is the default one.

    So a page of a gateway that knows no namespaces is followed by the right one, and the other way round.
    """
    return last.url if last.namespace == DEFAULT_NAMESPACE else f"{last.url} {last.namespace}"


def _after(cursor: str | None) -> TargetId | None:
    if cursor is None:
        return None
    url, _blank, namespace = cursor.partition(" ")
    return TargetId(namespace or DEFAULT_NAMESPACE, url)


def _attempt(raw: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in raw.items() if name != "at_s"}
    return {"at": datetime.fromtimestamp(raw["at_s"], UTC), **rest}
