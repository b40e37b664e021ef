"""Routes of flow definitions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import asyncpg
from aiohttp import web

from penstock.core.access import Grant
from penstock.core.flow.outline import MAX_VERSION, references, task_types
from penstock.errors import InvalidRecord, one_or_all
from penstock.flows.faults import Fault, pointer
from penstock.flows.loading import MAX_BYTES
from penstock.flows.validation import validate
from penstock.gateway.access import grant_of
from penstock.gateway.bodies import read_json
from penstock.gateway.changes import note
from penstock.gateway.paging import page_size, respond_page, split_page
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.views import pick
from penstock.gateway.visibility import require_own_name, visible_name, visible_namespaces
from penstock.http.server import integer_parameter, refuse_unknown_parameters, respond, text_parameter
from penstock.postgres import flow_definitions
from penstock.postgres.flow_definitions import DefinitionCache, Reached, StoredDefinition
from penstock.postgres.queries import transaction
from penstock.postgres.types import TypeCache

_NAME_COLUMNS = ("name", "version", "versions", "created_at")
_VERSION_COLUMNS = ("version", "description", "created_at", "created_by")


class FlowDefinitionRoutes:
    """The routes below /flow-definitions.

    Args:
        settings: limits.
        pool: the database.
        types: the registered types.
        definitions: the definitions that child flows name.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        types: TypeCache,
        definitions: DefinitionCache,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._types = types
        self._definitions = definitions

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.post("/flow-definitions", self.upload),
            web.get("/flow-definitions", self.find, allow_head=False),
            web.get("/flow-definitions/{name}", self.versions, allow_head=False),
            web.get("/flow-definitions/{name}/versions/{version:[0-9]+}", self.get, allow_head=False),
        ]

    async def upload(self, request: web.Request) -> web.Response:
        """POST /flow-definitions: stores a version, which never changes afterwards."""
        refuse_unknown_parameters(request)
        raw = await read_json(request, min(self._settings.gateway_body_limit_bytes, MAX_BYTES))
        grant = grant_of(request)
        existing = await self._existing(raw, grant)
        if existing is not None:
            flow_definitions.require_same(existing, raw)
            stored, created = existing, False
        else:
            stored, created = await self._insert(raw, grant)
        # A version never changes, so its name is enough.
        note(request, definition=stored.name, version=stored.version, created=created)
        location = f"/flow-definitions/{stored.name}/versions/{stored.version}"
        return respond(stored.to_wire(), 201 if created else 200, {"Location": location})

    async def _existing(self, raw: Any, grant: Grant) -> StoredDefinition | None:
        """The stored version of a definition; None if there is none, or if it names none."""
        name = raw.get("flow") if isinstance(raw, dict) else None
        version = raw.get("version") if isinstance(raw, dict) else None
        if not isinstance(name, str) or isinstance(version, bool) or not isinstance(version, int | float):
            return None
        require_own_name(grant, name, "upload flow definitions")
        if "\0" in name or not 1 <= version <= MAX_VERSION or not isinstance(raw.get("nodes"), dict):
            return None
        return await flow_definitions.find(self._pool, name, int(version))

    async def _insert(self, raw: Any, grant: Grant) -> tuple[StoredDefinition, bool]:
        children = references(raw)
        names = task_types(raw)
        await self._types.require(names)
        types = frozenset(name for name in names if self._types.get(name) is not None and grant.covers(name))
        reached = await self._definitions.reach(children, visible=grant.covers)
        # A large definition takes a second, for which no connection is held.
        await _require_valid(raw, types, reached)
        actor = grant.actor or None
        if not children:
            return await flow_definitions.insert(self._pool, raw, actor)
        async with transaction(self._pool) as connection:
            await flow_definitions.lock(connection)
            now = await self._definitions.reach(children, visible=grant.covers, executor=connection)
            if now.outlines.keys() != reached.outlines.keys():
                # Another upload was faster. The two could contain each other.
                await _require_valid(raw, types, now)
            return await flow_definitions.insert(connection, raw, actor)

    async def find(self, request: web.Request) -> web.Response:
        """GET /flow-definitions: by name, with the newest version of each."""
        refuse_unknown_parameters(request, "limit", "cursor")
        size = page_size(request)
        rows = await flow_definitions.names(
            self._pool,
            namespaces=visible_namespaces(request),
            after=text_parameter(request, "cursor"),
            limit=size + 1,
        )
        return respond_page(
            "definitions", rows, size, lambda row: str(row["name"]), lambda row: pick(row, _NAME_COLUMNS)
        )

    async def versions(self, request: web.Request) -> web.Response:
        """GET /flow-definitions/{name}: its versions, newest first."""
        refuse_unknown_parameters(request, "limit", "cursor")
        name = visible_name(request, flow_definitions.not_found)
        size = page_size(request)
        below = integer_parameter(request, "cursor", 0, low=1, high=MAX_VERSION) or None
        rows = await flow_definitions.versions(self._pool, name, below=below, limit=size + 1)
        if not rows and below is None:
            raise flow_definitions.not_found(name)
        page, next_cursor = split_page(rows, size, lambda row: str(row["version"]))
        return respond(
            {"name": name, "versions": [pick(row, _VERSION_COLUMNS) for row in page], "next": next_cursor}
        )

    async def get(self, request: web.Request) -> web.Response:
        """GET /flow-definitions/{name}/versions/{version}."""
        refuse_unknown_parameters(request)
        text = request.match_info["version"]
        version = int(text) if len(text) <= 10 else 0
        name = visible_name(request, lambda name: flow_definitions.not_found(name, version))
        if not 1 <= version <= MAX_VERSION:
            raise flow_definitions.not_found(name, version)
        return respond((await flow_definitions.get(self._pool, name, version)).to_wire())


async def _require_valid(raw: Any, types: AbstractSet[str], reached: Reached) -> None:
    """Requires a definition without faults.

    Raises:
        InvalidRecord: it has one fault.
        Faults: it has several.
    """

    def found(name: str, version: int | None) -> dict[str, Any] | None:
        outline = reached.get(name, version)
        return None if outline is None else outline.reduced()

    # On another thread, so that other requests are answered meanwhile.
    faults = await asyncio.to_thread(validate, raw, types=types, definitions=found)
    records = [InvalidRecord(_text(fault), pointer=fault.pointer) for fault in faults]
    if records := records or list(_nul_faults(raw, "")):
        raise one_or_all(records)


def _nul_faults(value: Any, at: str) -> Iterator[InvalidRecord]:
    """Faults of texts that PostgreSQL cannot read from JSON; the value is not nested deep."""
    if isinstance(value, str) and "\0" in value:
        yield InvalidRecord("the text has a NUL character: remove it", pointer=at)
    elif isinstance(value, dict):
        for name, each in value.items():
            if "\0" in name:
                yield InvalidRecord("the name has a NUL character: remove it", pointer=at)
            yield from _nul_faults(each, at + pointer(name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _nul_faults(each, at + pointer(index))


def _text(fault: Fault) -> str:
    if fault.expression_at is None:
        return fault.message
    line, column = fault.expression_at
    return f"{fault.message} (at {line}:{column} of the expression)"
