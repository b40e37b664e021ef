"""Routes of callback targets: health, backlog, and the settings of operators.

A target is a URL in a namespace. Proxies decode %2F and merge slashes in paths. So the URL is in
the query of a GET and in the body of a POST.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.contracts import subscription
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.core.target import TargetId
from penstock.errors import NotFound
from penstock.gateway.bodies import read_document
from penstock.gateway.changes import observer
from penstock.gateway.paging import page_size, split_page
from penstock.gateway.views import pick
from penstock.gateway.visibility import MAX_NAMESPACE_LENGTH, resolve_target, visible_namespaces
from penstock.http.server import (
    choice_parameter,
    refuse_unknown_parameters,
    respond,
    text_parameter,
)
from penstock.postgres import targets
from penstock.postgres.queries import transaction
from penstock.postgres.types import TypeCache

STATES = ("normal", "abnormal", "disabled")
# Smaller than other pages, since the held callbacks of each target are counted.
MAX_PAGE_SIZE = 100
MAX_URL_LENGTH = 2048

_COLUMNS = (
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


class TargetRoutes:
    """The routes below /targets.

    Args:
        pool: the database.
        types: the registered types, which determine the namespaces.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], types: TypeCache) -> None:
        self._pool = pool
        self._types = types

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/targets", self.find, allow_head=False),
            web.post("/targets/disable", self.disable),
            web.post("/targets/enable", self.enable),
            web.post("/targets/limit", self.limit),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /targets: in the order of URL and namespace."""
        refuse_unknown_parameters(request, "state", "prefix", "url", "namespace", "limit", "cursor")
        state = choice_parameter(request, "state", "", (*STATES, "")) or None
        size = page_size(request, largest=MAX_PAGE_SIZE)
        url = text_parameter(request, "url", longest=MAX_URL_LENGTH)
        prefix = text_parameter(request, "prefix", longest=MAX_URL_LENGTH)
        namespaces = visible_namespaces(
            request, text_parameter(request, "namespace", longest=MAX_NAMESPACE_LENGTH)
        )
        after = _read_cursor(request)
        if url is not None:
            targets_of_url = await targets.get(self._pool, url, namespaces)
            rows = [
                row
                for row in targets_of_url
                if state in (None, row["state"])
                and (after is None or targets.target_in(row)[::-1] > after[::-1])
            ]
        else:
            rows = await targets.find(
                self._pool, state=state, prefix=prefix, after=after, limit=size + 1, namespaces=namespaces
            )
        page, next_cursor = split_page(rows, size, _cursor)
        return respond({"targets": await self._documents(page), "next": next_cursor})

    async def disable(self, request: web.Request) -> web.Response:
        """POST /targets/disable: the target may be new."""
        raw, target = await self._read_body(request, "TargetDisable")
        async with self._changing(request, target) as connection:
            changed = await targets.disable(connection, target, raw["why"])
        return await self._answer(target, changed=changed)

    async def enable(self, request: web.Request) -> web.Response:
        """POST /targets/enable: resets the health, and requeues held callbacks."""
        _raw, target = await self._read_body(request, "TargetEnable")
        async with self._changing(request, target) as connection:
            changed = await targets.enable(connection, target)
        return await self._answer(target, changed=changed)

    async def limit(self, request: web.Request) -> web.Response:
        """POST /targets/limit."""
        raw, target = await self._read_body(request, "TargetLimit")
        async with self._changing(request, target) as connection:
            await targets.limit(connection, target, raw["rate"])
        return await self._answer(target, changed=True)

    @asynccontextmanager
    async def _changing(self, request: web.Request, target: TargetId) -> AsyncIterator[Any]:
        """Yields a connection in a transaction; notes how the target changed in it."""
        async with transaction(self._pool) as connection:
            before = await targets.settings(connection, target)
            yield connection
            after = await targets.settings(connection, target)
        observer(request, namespace=target.namespace, url=target.url)(before, after)

    async def _read_body(self, request: web.Request, schema: str) -> tuple[dict[str, Any], TargetId]:
        raw = await read_document(request, schema)
        # An invalid URL would be a new target, and the intended one would stay as it is.
        subscription.read_one(raw["url"], "/url")
        return raw, await resolve_target(request, self._pool, self._types, raw["url"], raw.get("namespace"))

    async def _answer(self, target: TargetId, *, changed: bool) -> web.Response:
        rows = await targets.get(self._pool, target.url, [target.namespace])
        if not rows:
            raise NotFound(f"there is no target {target}: it has never had a callback")
        [document] = await self._documents(rows)
        return respond({"changed": changed, "target": document})

    async def _documents(self, rows: Sequence[asyncpg.Record]) -> list[dict[str, Any]]:
        ids = [targets.target_in(row) for row in rows]
        backlog = await targets.backlog(self._pool, ids) if rows else {}
        return [
            {
                **pick(row, _COLUMNS),
                "attempts": [_attempt(raw) for raw in orjson.loads(row["attempts"])],
                "backlog": backlog[target],
            }
            for row, target in zip(rows, ids, strict=True)
        ]


def _cursor(row: asyncpg.Record) -> str:
    """The URL, and after a space the namespace, unless it is the default one.

    A cursor without a namespace is the form of gateways before namespaces, which may run at the
    same time.
    """
    last = targets.target_in(row)
    return last.url if last.namespace == DEFAULT_NAMESPACE else f"{last.url} {last.namespace}"


def _read_cursor(request: web.Request) -> TargetId | None:
    cursor = text_parameter(request, "cursor", longest=MAX_URL_LENGTH + 1 + MAX_NAMESPACE_LENGTH)
    if cursor is None:
        return None
    url, _space, namespace = cursor.partition(" ")
    return TargetId(namespace or DEFAULT_NAMESPACE, url)


def _attempt(raw: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in raw.items() if name != "at_s"}
    return {"at": datetime.fromtimestamp(raw["at_s"], UTC), **rest}
