"""Routes of schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
from aiohttp import web

from penstock.core.access import Grant
from penstock.core.changes import difference
from penstock.core.flow.outline import MAX_VERSION
from penstock.core.schedule import Ticks, latest_ticks
from penstock.core.schedule_policy import Skip, SkipReason
from penstock.cron import parse_cron
from penstock.errors import InvalidRecord, NotFound, one_or_all
from penstock.gateway.access import grant_of
from penstock.gateway.bodies import read_json
from penstock.gateway.changes import note
from penstock.gateway.paging import id_cursor, page_size, respond_page
from penstock.gateway.schedule_history import cursor_of, read_cursor, record_of, tasks_of
from penstock.gateway.schedule_settings import own_faults, settings_of, start_faults
from penstock.gateway.scheduled_tasks import as_flow, require_type
from penstock.gateway.views import pick
from penstock.gateway.visibility import require_own_name, visible_name, visible_namespaces
from penstock.http.server import (
    integer_parameter,
    moment_parameter,
    refuse_unknown_parameters,
    respond,
    text_parameter,
)
from penstock.postgres import schedules
from penstock.postgres.flow_definitions import DefinitionCache, Reached
from penstock.postgres.queries import transaction
from penstock.postgres.schedule_rows import Schedule, Settings
from penstock.postgres.types import TypeCache

# Most ticks of a preview.
MAX_PREVIEW = 1_000
# Ticks of a pause that are counted; of more only the span is recorded.
_COUNTED = 1_000

_SKIP_COLUMNS = ("id", "first_tick", "last_tick", "ticks", "reason", "detail", "created_at")


class ScheduleRoutes:
    """The routes below /schedules, without backfills.

    Args:
        pool: the database.
        types: the types of plain tasks that schedules start.
        definitions: the definitions that schedules start.
    """

    def __init__(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        types: TypeCache,
        definitions: DefinitionCache,
    ) -> None:
        self._pool = pool
        self._types = types
        self._definitions = definitions

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.put("/schedules/{name}", self.put),
            web.get("/schedules", self.find, allow_head=False),
            web.get("/schedules/{name}", self.get, allow_head=False),
            web.delete("/schedules/{name}", self.remove),
            web.post("/schedules/{name}/pause", self.pause),
            web.post("/schedules/{name}/resume", self.resume),
            web.get("/schedules/{name}/ticks", self.ticks, allow_head=False),
            web.get("/schedules/{name}/skips", self.skips, allow_head=False),
            web.get("/schedules/{name}/history", self.history, allow_head=False),
        ]

    async def put(self, request: web.Request) -> web.Response:
        """PUT /schedules/{name}: creates a schedule, or replaces its settings.

        A change of the cron expression or of the zone begins now. Another one keeps the position,
        so that no tick is skipped.
        """
        refuse_unknown_parameters(request)
        name, grant = request.match_info["name"], grant_of(request)
        require_own_name(grant, name, "configure schedules")
        raw = await read_json(request)
        faults = own_faults(name, raw)
        if faults:
            is_named = "flow" in raw and all(fault.pointer != "/flow" for fault in faults)
            reached = await self._reach(raw, grant, self._pool) if is_named else Reached()
            raise one_or_all([*faults, *start_faults(name, raw, datetime.now(UTC), reached)])
        if "type" in raw:
            await require_type(self._types, grant, name, raw["type"])
        async with transaction(self._pool) as connection:
            existing = await schedules.locked(connection, name)
            if "type" in raw:
                raw = await as_flow(connection, name, raw, grant.actor or None)
            settings = settings_of(name, raw, existing)
            now = existing.now if existing else await schedules.clock(connection)
            position = now if existing is None or _restarts(existing, settings) else existing.position
            next_tick = parse_cron(settings.cron, settings.zone).first_after(position)
            reached = await self._reach(raw, grant, connection)
            # As at a tick: the definition exists, and the inputs fit.
            faults = start_faults(name, raw, next_tick or now, reached)
            if next_tick is None:
                faults.append(
                    InvalidRecord("no day within fifty years matches: it never runs", pointer="/cron")
                )
            if faults:
                raise one_or_all(faults)
            assert next_tick is not None
            if existing is not None and _restarts(existing, settings):
                await _record_pause(connection, existing, now)
            stored = await schedules.put(
                connection, settings, position=position, next_tick=next_tick, actor=grant.actor or None
            )
        _note(request, existing, stored)
        headers = {"Location": f"/schedules/{name}"}
        return respond(stored.to_wire(), 200 if existing else 201, headers)

    async def _reach(self, raw: Mapping[str, Any], grant: Grant, executor: Any) -> Reached:
        version = raw.get("version")
        is_version = isinstance(version, int | float) and 1 <= version <= MAX_VERSION
        reference = raw["flow"], int(version) if is_version and version is not None else None
        return await self._definitions.reach([reference], visible=grant.covers, executor=executor)

    async def find(self, request: web.Request) -> web.Response:
        """GET /schedules: by name."""
        refuse_unknown_parameters(request, "flow", "limit", "cursor")
        size = page_size(request)
        found = await schedules.find(
            self._pool,
            after=text_parameter(request, "cursor") or "",
            namespaces=visible_namespaces(request),
            flow=text_parameter(request, "flow"),
            limit=size + 1,
        )
        return respond_page("schedules", found, size, lambda each: each.settings.name, Schedule.to_wire)

    async def get(self, request: web.Request) -> web.Response:
        """GET /schedules/{name}."""
        refuse_unknown_parameters(request)
        return respond((await visible_schedule(request, self._pool)).to_wire())

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE /schedules/{name}: its flows stay, and its backfills stop. It may be repeated."""
        refuse_unknown_parameters(request)
        name, grant = request.match_info["name"], grant_of(request)
        removed = False
        if grant.covers(name) and "\0" not in name:
            removed_by = grant.actor or "removal of the schedule"
            async with transaction(self._pool) as connection:
                existing = await schedules.locked(connection, name)
                removed = await schedules.remove(connection, name, removed_by)
            if removed:
                _note(request, existing, None)
        return respond({"name": name, "removed": removed})

    async def pause(self, request: web.Request) -> web.Response:
        """POST /schedules/{name}/pause: no tick starts a flow; running flows go on."""
        return await self._set_paused(request, paused=True)

    async def resume(self, request: web.Request) -> web.Response:
        """POST /schedules/{name}/resume: continues with the next tick from now."""
        return await self._set_paused(request, paused=False)

    async def _set_paused(self, request: web.Request, *, paused: bool) -> web.Response:
        refuse_unknown_parameters(request)
        name = visible_name(request, _not_found)
        async with transaction(self._pool) as connection:
            schedule = await schedules.locked(connection, name)
            if schedule is None:
                raise _not_found(name)
            before, position, next_tick = schedule, schedule.position, schedule.next_tick
            if schedule.settings.paused and not paused:
                await _record_pause(connection, schedule, schedule.now)
                position = schedule.now
                next_tick = ticks_of(schedule).first_after(position)
            if schedule.settings.paused != paused:
                schedule = await schedules.set_paused(
                    connection, name, paused=paused, position=position, next_tick=next_tick
                )
        _note(request, before, schedule)
        return respond(schedule.to_wire())

    async def ticks(self, request: web.Request) -> web.Response:
        """GET /schedules/{name}/ticks: the next ticks, from now or from another moment."""
        refuse_unknown_parameters(request, "count", "after")
        count = integer_parameter(request, "count", 10, low=1, high=MAX_PREVIEW)
        schedule = await visible_schedule(request, self._pool)
        after = moment_parameter(request, "after") or await schedules.clock(self._pool)
        zone = ZoneInfo(schedule.settings.zone)
        found = await asyncio.to_thread(lambda: list(islice(ticks_of(schedule).after(after), count)))
        return respond(
            {"ticks": [{"tick": tick, "local": tick.astimezone(zone).isoformat()} for tick in found]}
        )

    async def skips(self, request: web.Request) -> web.Response:
        """GET /schedules/{name}/skips: ticks that started no flow, the latest first."""
        refuse_unknown_parameters(request, "limit", "cursor")
        size = page_size(request)
        schedule = await visible_schedule(request, self._pool)
        rows = await schedules.skips(
            self._pool, schedule.settings.name, before=id_cursor(request), limit=size + 1
        )
        return respond_page(
            "skips", rows, size, lambda row: str(row["id"]), lambda row: pick(row, _SKIP_COLUMNS)
        )

    async def history(self, request: web.Request) -> web.Response:
        """GET /schedules/{name}/history: runs and skipped ticks, the latest tick first."""
        refuse_unknown_parameters(request, "limit", "cursor")
        size, behind = page_size(request), read_cursor(request)
        name = (await visible_schedule(request, self._pool)).settings.name
        found = await schedules.history(self._pool, name, behind=behind, limit=size + 1)
        tasks = await tasks_of(self._pool, name, [row for _, row in found])
        return respond_page(
            "records", found, size, lambda each: cursor_of(each[0]), lambda each: record_of(each[1], tasks)
        )


async def visible_schedule(request: web.Request, pool: asyncpg.Pool[asyncpg.Record]) -> Schedule:
    """The schedule of a request's path.

    Raises:
        NotFound: there is none that the request may see.
        PostgresUnavailable: the database is unavailable.
    """
    name = visible_name(request, _not_found)
    schedule = await schedules.get(pool, name)
    if schedule is None:
        raise _not_found(name)
    return schedule


def _note(request: web.Request, before: Schedule | None, after: Schedule | None) -> None:
    change = difference(
        None if before is None else before.to_wire(), None if after is None else after.to_wire()
    )
    if before and after and before.settings.callbacks != after.settings.callbacks:
        # A change of a header alone shows no difference, because its value is a secret.
        change["before"]["callbacks"] = before.to_wire()["callbacks"]
        change["after"]["callbacks"] = after.to_wire()["callbacks"]
    note(request, **change)


def _restarts(existing: Schedule, settings: Settings) -> bool:
    """Whether a change begins now, and leaves what was due before."""
    old = existing.settings
    return (old.cron, old.zone) != (settings.cron, settings.zone) or (old.paused and not settings.paused)


async def _record_pause(
    connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record], schedule: Schedule, now: datetime
) -> None:
    """Records the ticks that a schedule leaves by a pause, or by a change of its times."""
    if schedule.next_tick is None or schedule.next_tick > now:
        return
    latest, has_more = latest_ticks(ticks_of(schedule), schedule.position, now, _COUNTED)
    if latest:
        count = None if has_more else len(latest)
        skip = Skip(schedule.next_tick, latest[-1], count, SkipReason.PAUSED)
        await schedules.record_skips(connection, [(schedule.settings.name, skip)])


def ticks_of(schedule: Schedule) -> Ticks:
    """The ticks of a stored schedule."""
    return parse_cron(schedule.settings.cron, schedule.settings.zone)


def _not_found(name: str) -> NotFound:
    return NotFound(f"there is no schedule {name[:100]!r}")
