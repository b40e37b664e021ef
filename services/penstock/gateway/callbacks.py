"""Callbacks as rows: looking at them, and replaying those that have ended.

Replaying is bounded in each request and safe to repeat: what was replayed is not dead any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.errors import InvalidRecord
from penstock.gateway.openapi import conform
from penstock.gateway.ownership import LONGEST_NAMESPACE, namespace_meant, namespaces_seen
from penstock.gateway.rehearsal import COUNTED, SHOWN, moment_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.targets import LONGEST_URL
from penstock.gateway.tasks import json_of
from penstock.http.problems import BadParameter
from penstock.http.server import (
    LARGEST_ID,
    choice_in_query,
    number_in_query,
    refuse_unknown_parameters,
    respond,
    text_in_query,
)
from penstock.postgres import callbacks, replay, targets
from penstock.postgres.replay import AT_A_TIME, Found, Place, Which

STATES = ("pending", "held", "delivered", "dead")
PAGE = 50
LARGEST_PAGE = 500
# Most that one request replays; more of them are asked for again.
REPLAYED = 10_000

_SAME = (
    "id",
    "namespace",
    "target",
    "task_id",
    "state",
    "attempt",
    "replayed_after",
    "ordered",
    "diverted",
    "due_at",
    "created_at",
    "finished_at",
)


class Callbacks:
    """The routes below /callbacks.

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
            web.get("/callbacks", self.find, allow_head=False),
            web.post("/callbacks/replay", self.replay),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /callbacks: in the order of their targets and then of their creation, by keyset."""
        refuse_unknown_parameters(
            request, "id", "target", "namespace", "task_id", "state", "since", "until", "limit", "cursor"
        )
        task_id = number_in_query(request, "task_id", 0, low=1, high=LARGEST_ID) or None
        ids = _ids_in(request)
        anywhere = ids is not None or task_id is not None
        state = choice_in_query(request, "state", "" if anywhere else "dead", (*STATES, "")) or None
        if state in (None, "delivered") and not anywhere:
            raise BadParameter("those delivered are found by task_id or id", parameter="state")
        which = Which(
            ids=ids,
            task_id=task_id,
            target=text_in_query(request, "target", longest=LONGEST_URL),
            state=state,
            since=_moment_in(request, "since"),
            until=_moment_in(request, "until"),
            namespaces=namespaces_seen(
                request, text_in_query(request, "namespace", longest=LONGEST_NAMESPACE)
            ),
        )
        limit = number_in_query(request, "limit", PAGE, low=1, high=LARGEST_PAGE)
        found = await replay.find(
            self._pool, which, behind=_place_in(request), limit=LARGEST_PAGE if ids else limit + 1
        )
        page = found if ids else found[:limit]
        return respond(
            {
                "callbacks": await self._shown(page),
                "next": f"{page[-1].place.seq} {page[-1].place.target}" if len(found) > len(page) else None,
            }
        )

    async def replay(self, request: web.Request) -> web.Response:
        """POST /callbacks/replay."""
        refuse_unknown_parameters(request)
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "ReplayRequest")
        namespace = raw.get("namespace")
        if "target" in raw:
            # All of a target, and not of an address.
            namespace = namespace_meant(request, namespace)
        which = Which(
            ids=raw.get("ids"),
            task_id=int(raw["task_id"]) if "task_id" in raw else None,
            target=raw.get("target"),
            state=raw.get("state", "dead"),
            since=moment_of(raw, "since"),
            until=moment_of(raw, "until"),
            namespaces=namespaces_seen(request, namespace),
        )
        if which.state == "delivered" and which.ids is None:
            raise InvalidRecord(
                "delivered callbacks are replayed by their ids only: each would be heard twice",
                pointer="/state",
            )
        limit = int(raw.get("limit", REPLAYED))
        if raw.get("dry_run"):
            return respond(await self._rehearse(which))
        return respond(await self._replay(which, limit, raw.get("rate"), raw.get("start_in_s", 0.0)))

    async def _rehearse(self, which: Which) -> dict[str, Any]:
        found = await replay.find(self._pool, which, behind=Place(), limit=COUNTED + 1)
        counted = found[:COUNTED]
        of_target = Counter(one.target for one in counted)
        disabled = await targets.disabled(self._pool, [*of_target])
        return {
            "dry_run": True,
            "replayed": len(counted),
            "held": sum(of_target[target] for target in disabled),
            "disabled": sorted({target.url for target in disabled})[:SHOWN],
            "more": len(found) > len(counted),
            "examples": await self._shown(counted[:SHOWN]),
        }

    async def _replay(
        self, which: Which, limit: int, rate: float | None, start_in_s: float
    ) -> dict[str, Any]:
        place, more = Place(), True
        replayed, held = 0, 0
        first: list[str] = []
        disabled: dict[str, None] = {}
        while more and replayed < limit:
            size = min(AT_A_TIME, limit - replayed)
            found = await replay.find(self._pool, which, behind=place, limit=size + 1)
            more, found = len(found) > size, found[:size]
            if not found:
                break
            place = found[-1].place
            gap_s = 1 / rate if rate else 0.0
            due_in_s = [start_in_s + (replayed + number) * gap_s for number in range(len(found))]
            assert which.state is not None
            rows = await replay.replay(self._pool, found, due_in_s, state=which.state)
            if rows and not replayed:
                await callbacks.announce(self._pool, start_in_s)
            replayed += len(rows)
            waiting = [row["target"] for row in rows if row["state"] == "held"]
            held += len(waiting)
            disabled.update(dict.fromkeys(waiting))
            first += [row["id"] for row in rows][: SHOWN - len(first)]
        return {
            "dry_run": False,
            "replayed": replayed,
            "held": held,
            "disabled": [*disabled][:SHOWN],
            "more": more,
            "examples": [_document(row) for row in await replay.read(self._pool, first)],
        }

    async def _shown(self, found: Sequence[Found]) -> list[dict[str, Any]]:
        return [_document(row) for row in await replay.read(self._pool, [one.id for one in found])]


def _document(row: asyncpg.Record) -> dict[str, Any]:
    return {
        **{name: row[name] for name in _SAME},
        "error": orjson.loads(row["error"]) if row["error"] else None,
    }


def _ids_in(request: web.Request) -> list[str] | None:
    ids = request.query.getall("id", [])
    if len(ids) > LARGEST_PAGE or any("\0" in one for one in ids):
        raise BadParameter(f"give at most {LARGEST_PAGE} ids", parameter="id")
    return ids or None


def _moment_in(request: web.Request, name: str) -> datetime | None:
    text = text_in_query(request, name)
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError:
        moment = None
    if text and (moment is None or moment.tzinfo is None):
        raise BadParameter("must be a moment such as 2026-11-21T09:30:00Z", parameter=name)
    return moment


def _place_in(request: web.Request) -> Place:
    text = text_in_query(request, "cursor", longest=LONGEST_URL + 20)
    if text is None:
        return Place()
    seq, blank, target = text.partition(" ")
    if not (blank and seq.isascii() and seq.isdigit() and len(seq) < 19):
        raise BadParameter("give `next` of the page before", parameter="cursor")
    return Place(target, int(seq))
