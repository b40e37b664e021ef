"""Routes of task types, and the refresh of their cache by notification."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import asyncpg
from aiohttp import web

from penstock.contracts.task_type import TaskType, read_task_type
from penstock.core.access import Action
from penstock.core.changes import difference
from penstock.errors import Forbidden, InvalidRecord, PostgresUnavailable, SessionLost
from penstock.gateway.access import grant_of
from penstock.gateway.bodies import read_json
from penstock.gateway.changes import note
from penstock.gateway.openapi import conform as conform_change
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.visibility import require_own_name, visible_name
from penstock.http.server import refuse_unknown_parameters, respond
from penstock.postgres import durations, types
from penstock.postgres.session import Session, open_session
from penstock.postgres.types import CHANNEL, TypeCache, TypeLimits

log = logging.getLogger(__name__)

LISTEN_RETRY_S = 1.0
# How often the listening session checks that its server still accepts writes.
WRITABLE_CHECK_S = 30.0

# Fields that an operator may change: whether and how fast tasks are released.
OPERATOR_FIELDS = frozenset({"paused", "max_in_flight", "starts_per_s", "max_per_key"})
_IMMUTABLE_FIELDS = ("name", "partitions")


class TypeRoutes:
    """The routes below /types.

    Args:
        settings: limits.
        pool: the database.
        cache: the cache that submissions are checked by.
    """

    def __init__(
        self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record], cache: TypeCache
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._cache = cache

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.post("/types", self.register),
            web.get("/types", self.find, allow_head=False),
            web.get("/types/{name}", self.get, allow_head=False),
            web.get("/types/{name}/durations", self.durations, allow_head=False),
            web.get("/owners", self.owners, allow_head=False),
            web.patch("/types/{name}", self.change),
        ]

    async def register(self, request: web.Request) -> web.Response:
        """POST /types: registers a type, or changes its settings."""
        raw = await read_json(request)
        settings = read_task_type(raw)
        require_own_name(grant_of(request), settings.name, "register types")
        limits = TypeLimits(self._settings.gateway_namespace_types, self._settings.gateway_type_partitions)
        task_type, created = await types.register(self._pool, settings, limits, _observer(request))
        # The notification may arrive after this client's next request.
        self._cache.mark_outdated()
        return respond(task_type.masked(), 201 if created else 200, {"Location": f"/types/{task_type.name}"})

    async def change(self, request: web.Request) -> web.Response:
        """PATCH /types/{name}: fields that the body lacks stay as they are."""
        name = visible_name(request, types.not_found)
        raw = await read_json(request)
        conform_change(raw, "TaskTypeChange")
        immutable = next((field for field in _IMMUTABLE_FIELDS if field in raw), None)
        if immutable is not None:
            raise InvalidRecord(f"the {immutable} of a type cannot be changed", pointer=f"/{immutable}")
        admin_fields = ", ".join(sorted(set(raw) - OPERATOR_FIELDS))
        if admin_fields and not grant_of(request).allows(Action.CONFIGURE):
            raise Forbidden(f"a change of {admin_fields} needs a role that may {Action.CONFIGURE}")
        task_type = await types.change(
            self._pool, name, lambda current: read_task_type({**current.to_wire(), **raw}), _observer(request)
        )
        self._cache.mark_outdated()
        return respond(task_type.masked())

    async def find(self, request: web.Request) -> web.Response:
        """GET /types."""
        covers = grant_of(request).covers
        task_types = await types.all_types(self._pool)
        return respond({"types": [t.masked() for t in task_types.values() if covers(t.name)]})

    async def owners(self, request: web.Request) -> web.Response:
        """GET /owners: the task-sync process that releases each type."""
        covers = grant_of(request).covers
        owners = await types.owners(self._pool)
        return respond(
            {
                "owners": [
                    {"type": name, "process": process} for name, process in owners.items() if covers(name)
                ]
            }
        )

    async def get(self, request: web.Request) -> web.Response:
        """GET /types/{name}."""
        name = visible_name(request, types.not_found)
        task_type = (await types.all_types(self._pool)).get(name)
        if task_type is None:
            raise types.not_found(name)
        return respond(task_type.masked())

    async def durations(self, request: web.Request) -> web.Response:
        """GET /types/{name}/durations: how long the tasks that ended last took."""
        refuse_unknown_parameters(request)
        name = visible_name(request, types.not_found)
        if name not in await types.all_types(self._pool):
            raise types.not_found(name)
        found = await durations.of_type(self._pool, name)
        return respond(
            {
                "type": name,
                "since": found.since,
                "tasks": [{"first_stage": row["stage"], **_duration(row)} for row in found.tasks],
                "stages": [{"stage": row["stage"], **_duration(row)} for row in found.stages],
            }
        )


def _duration(row: asyncpg.Record) -> dict[str, Any]:
    return {"count": row["counted"], "p50_s": row["p50_s"], "p95_s": row["p95_s"]}


def _observer(request: web.Request) -> types.Observer:
    def observe(before: TaskType | None, after: TaskType) -> None:
        change = difference(None if before is None else before.masked(), after.masked())
        if before is not None and before.callbacks != after.callbacks:
            # A change of a header alone shows no difference, because its value is a secret.
            change["before"]["callbacks"] = before.masked()["callbacks"]
            change["after"]["callbacks"] = after.masked()["callbacks"]
        note(request, type=after.name, **change)

    return observe


async def _until_lost(session: Session) -> None:
    # A server that was demoted may keep its connections; only a query shows that it is read-only.
    while not session.lost.is_set():
        try:
            async with asyncio.timeout(WRITABLE_CHECK_S):
                await session.lost.wait()
        except TimeoutError:
            await session.fetch("history.now")
            session.ensure()


async def keep_fresh(settings: GatewaySettings, cache: TypeCache) -> None:
    """Marks the cache outdated whenever a type changes, until cancelled."""
    while True:
        try:
            async with open_session(settings.sessions, "gateway types", locks=False) as session:
                await session.listen(CHANNEL, lambda _name: cache.mark_outdated())
                # A type may have changed before the session listened.
                cache.mark_outdated()
                await _until_lost(session)
        except (PostgresUnavailable, SessionLost) as error:
            log.warning(
                "The gateway does not receive changes of types; trying again",
                extra={"event": "type_listener_lost", "error": error},
            )
        await asyncio.sleep(LISTEN_RETRY_S)
