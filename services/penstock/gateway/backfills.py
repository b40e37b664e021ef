"""Routes of backfills: runs of a schedule over a past range."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import islice
from typing import Any

import asyncpg
from aiohttp import web

from penstock.errors import InvalidRecord, NotFound
from penstock.gateway.access import grant_of
from penstock.gateway.bodies import read_document
from penstock.gateway.changes import note
from penstock.gateway.dry_run import timestamp_in
from penstock.gateway.paging import id_cursor, page_size, split_page
from penstock.gateway.schedules import ticks_of, visible_schedule
from penstock.gateway.views import pick
from penstock.gateway.visibility import visible_namespaces
from penstock.http.server import refuse_unknown_parameters, respond, text_parameter
from penstock.postgres import backfills, schedules
from penstock.postgres.queries import transaction
from penstock.postgres.read_pool import reading

# Most ticks of a backfill.
MAX_TICKS = 100_000

_COLUMNS = (
    "id",
    "schedule",
    "since",
    "until",
    "rate",
    "max_running",
    "rerun",
    "state",
    "total",
    "started",
    "already_run",
    "refused",
    "actor",
    "stopped_by",
    "error",
    "created_at",
    "finished_at",
)
# What the audit keeps of a request.
_NOTED = ("since", "until", "rate", "max_running", "rerun", "by")
# A range includes its first moment, and ticks are those after a position.
_BEFORE = timedelta(microseconds=1)


class BackfillRoutes:
    """The routes of backfills.

    Args:
        pool: the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.post("/schedules/{name}/backfill", self.create),
            web.get("/backfills", self.find, allow_head=False),
            web.get("/backfills/{id:[0-9]+}", self.get, allow_head=False),
            web.post("/backfills/{id:[0-9]+}/stop", self.stop),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """POST /schedules/{name}/backfill: runs the ticks of a past range."""
        raw = await read_document(request, "BackfillRequest")
        schedule = await visible_schedule(request, self._pool)
        now = await schedules.clock(self._pool)
        since = timestamp_in(raw, "since")
        until = timestamp_in(raw, "until") or now
        assert since is not None
        if until > now:
            raise InvalidRecord("it is in the future: a backfill is over a past range", pointer="/until")
        if until < since:
            raise InvalidRecord("the range ends before it begins", pointer="/until")
        position = since - _BEFORE
        found = await asyncio.to_thread(
            lambda: list(islice(ticks_of(schedule).between(position, until), MAX_TICKS + 1))
        )
        if len(found) > MAX_TICKS:
            raise InvalidRecord(
                f"the range has more than {MAX_TICKS:,} ticks: run it in parts", pointer="/since"
            )
        name = schedule.settings.name
        rerun = raw.get("rerun", False)
        if raw.get("dry_run"):
            with reading(grant_of(request).actor, lists=True):
                existing = await backfills.flows_of_ticks(self._pool, name, found)
            document = {
                "dry_run": True,
                "total": len(found),
                "already_run": len(existing),
                "would_start": len(found) - (0 if rerun else len(existing)),
                "first_tick": found[0] if found else None,
                "last_tick": found[-1] if found else None,
            }
            return respond(document)
        row = await backfills.create(
            self._pool,
            schedule=name,
            since=since,
            until=until,
            total=len(found),
            position=position,
            rate=raw.get("rate"),
            max_running=int(raw["max_running"]) if "max_running" in raw else None,
            rerun=rerun,
            asked_by=raw["by"],
            actor=grant_of(request).actor or None,
        )
        note(request, backfill=row["id"], request={name: raw[name] for name in _NOTED if name in raw})
        return respond(_document(row, {}), 201, {"Location": f"/backfills/{row['id']}"})

    async def find(self, request: web.Request) -> web.Response:
        """GET /backfills: the latest first."""
        refuse_unknown_parameters(request, "schedule", "limit", "cursor")
        size = page_size(request)
        rows = await backfills.find(
            self._pool,
            schedule=text_parameter(request, "schedule"),
            namespaces=visible_namespaces(request),
            before=id_cursor(request),
            limit=size + 1,
        )
        page, next_cursor = split_page(rows, size, lambda row: str(row["id"]))
        counts = await backfills.counts(self._pool, [row["id"] for row in page])
        return respond(
            {
                "backfills": [_document(row, counts[row["id"]]) for row in page],
                "next": next_cursor,
            }
        )

    async def get(self, request: web.Request) -> web.Response:
        """GET /backfills/{id}."""
        refuse_unknown_parameters(request)
        row = await self._visible(request)
        counts = await backfills.counts(self._pool, [row["id"]])
        return respond(_document(row, counts[row["id"]]))

    async def stop(self, request: web.Request) -> web.Response:
        """POST /backfills/{id}/stop: it starts no further flow."""
        raw = await read_document(request, "BackfillStop")
        backfill_id = (await self._visible(request))["id"]
        async with transaction(self._pool) as connection:
            await backfills.stop(connection, backfill_id, raw["by"], cancel=raw.get("cancel", False))
        note(request, request={name: raw[name] for name in ("by", "cancel") if name in raw})
        return await self.get(request)

    async def _visible(self, request: web.Request) -> asyncpg.Record:
        text = request.match_info["id"]
        row = await backfills.get(self._pool, int(text)) if len(text) < 19 else None
        if row is None or not grant_of(request).covers(row["schedule"]):
            raise NotFound(f"there is no backfill {text[:80]}")
        return row


def _document(row: asyncpg.Record, flows: dict[str, int]) -> dict[str, Any]:
    return {**pick(row, _COLUMNS), "by": row["asked_by"], "flows": flows}
