"""Routes of callbacks: finding them, and replaying those that have ended.

A replay changes a bounded number of callbacks and is safe to repeat, since a replayed callback is
not dead any more.
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
from penstock.gateway.access import grant_of
from penstock.gateway.bodies import read_document
from penstock.gateway.changes import note
from penstock.gateway.dry_run import MAX_COUNTED, MAX_EXAMPLES, timestamp_in
from penstock.gateway.paging import MAX_PAGE_SIZE, page_size, split_page
from penstock.gateway.targets import MAX_URL_LENGTH
from penstock.gateway.views import pick
from penstock.gateway.visibility import MAX_NAMESPACE_LENGTH, target_namespace, visible_namespaces
from penstock.http.problems import BadParameter
from penstock.http.server import (
    MAX_ID,
    choice_parameter,
    integer_parameter,
    refuse_unknown_parameters,
    respond,
    text_parameter,
)
from penstock.postgres import callbacks, replay, targets
from penstock.postgres.read_pool import reading
from penstock.postgres.replay import BATCH_SIZE, CallbackFilter, Cursor, FoundCallback

STATES = ("pending", "held", "delivered", "dead")
# Most callbacks that one request replays; the client repeats the request for more.
MAX_REPLAYED = 10_000

_COLUMNS = (
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


# What the audit keeps of a request.
_NOTED = ("ids", "task_id", "target", "namespace", "state", "since", "until", "limit", "rate", "start_in_s")


class CallbackRoutes:
    """The routes below /callbacks.

    Args:
        pool: the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/callbacks", self.find, allow_head=False),
            web.post("/callbacks/replay", self.replay),
        ]

    async def find(self, request: web.Request) -> web.Response:
        """GET /callbacks: in the order of target and creation."""
        refuse_unknown_parameters(
            request, "id", "target", "namespace", "task_id", "state", "since", "until", "limit", "cursor"
        )
        task_id = integer_parameter(request, "task_id", 0, low=1, high=MAX_ID) or None
        ids = _read_ids(request)
        named = ids is not None or task_id is not None
        state = choice_parameter(request, "state", "" if named else "dead", (*STATES, "")) or None
        if state in (None, "delivered") and not named:
            raise BadParameter("delivered callbacks are found by task_id or id only", parameter="state")
        filters = CallbackFilter(
            ids=ids,
            task_id=task_id,
            target=text_parameter(request, "target", longest=MAX_URL_LENGTH),
            state=state,
            since=_read_timestamp(request, "since"),
            until=_read_timestamp(request, "until"),
            namespaces=visible_namespaces(
                request, text_parameter(request, "namespace", longest=MAX_NAMESPACE_LENGTH)
            ),
        )
        size = page_size(request)
        found = await replay.find(
            self._pool, filters, after=_read_cursor(request), limit=MAX_PAGE_SIZE if ids else size + 1
        )
        page, next_cursor = split_page(found, MAX_PAGE_SIZE if ids else size, _cursor)
        return respond({"callbacks": await self._documents(page), "next": next_cursor})

    async def replay(self, request: web.Request) -> web.Response:
        """POST /callbacks/replay."""
        raw = await read_document(request, "ReplayRequest")
        namespace = raw.get("namespace")
        if "target" in raw:
            # A target is a URL in one namespace.
            namespace = target_namespace(request, namespace)
        filters = CallbackFilter(
            ids=raw.get("ids"),
            task_id=int(raw["task_id"]) if "task_id" in raw else None,
            target=raw.get("target"),
            state=raw.get("state", "dead"),
            since=timestamp_in(raw, "since"),
            until=timestamp_in(raw, "until"),
            namespaces=visible_namespaces(request, namespace),
        )
        if filters.state == "delivered" and filters.ids is None:
            raise InvalidRecord(
                "delivered callbacks are replayed by their ids only, since their targets receive them twice",
                pointer="/state",
            )
        limit = int(raw.get("limit", MAX_REPLAYED))
        if raw.get("dry_run"):
            with reading(grant_of(request).actor, lists=True):
                return respond(await self._dry_run(filters))
        document = await self._replay(filters, limit, raw.get("rate"), raw.get("start_in_s", 0.0))
        counts = {name: document[name] for name in ("replayed", "held", "more")}
        note(request, request={name: raw[name] for name in _NOTED if name in raw}, **counts)
        return respond(document)

    async def _dry_run(self, filters: CallbackFilter) -> dict[str, Any]:
        found = await replay.find(self._pool, filters, after=Cursor(), limit=MAX_COUNTED + 1)
        counted = found[:MAX_COUNTED]
        by_target = Counter(callback.target for callback in counted)
        disabled = await targets.disabled(self._pool, [*by_target])
        return {
            "dry_run": True,
            "replayed": len(counted),
            "held": sum(by_target[target] for target in disabled),
            "disabled": sorted({target.url for target in disabled})[:MAX_EXAMPLES],
            "more": len(found) > len(counted),
            "examples": await self._documents(counted[:MAX_EXAMPLES]),
        }

    async def _replay(
        self, filters: CallbackFilter, limit: int, rate: float | None, start_in_s: float
    ) -> dict[str, Any]:
        cursor, more = Cursor(), True
        replayed, held = 0, 0
        examples: list[str] = []
        disabled: dict[str, None] = {}
        while more and replayed < limit:
            size = min(BATCH_SIZE, limit - replayed)
            found = await replay.find(self._pool, filters, after=cursor, limit=size + 1)
            more, found = len(found) > size, found[:size]
            if not found:
                break
            cursor = found[-1].position
            gap_s = 1 / rate if rate else 0.0
            due_in_s = [start_in_s + (replayed + i) * gap_s for i in range(len(found))]
            assert filters.state is not None
            rows = await replay.replay(self._pool, found, due_in_s, state=filters.state)
            if rows and not replayed:
                await callbacks.notify_due(self._pool, start_in_s)
            replayed += len(rows)
            held_targets = [row["target"] for row in rows if row["state"] == "held"]
            held += len(held_targets)
            disabled.update(dict.fromkeys(held_targets))
            examples += [row["id"] for row in rows][: MAX_EXAMPLES - len(examples)]
        return {
            "dry_run": False,
            "replayed": replayed,
            "held": held,
            "disabled": [*disabled][:MAX_EXAMPLES],
            "more": more,
            "examples": [_document(row) for row in await replay.read(self._pool, examples)],
        }

    async def _documents(self, found: Sequence[FoundCallback]) -> list[dict[str, Any]]:
        rows = await replay.read(self._pool, [callback.id for callback in found])
        return [_document(row) for row in rows]


def _document(row: asyncpg.Record) -> dict[str, Any]:
    return {
        **pick(row, _COLUMNS),
        "error": orjson.loads(row["error"]) if row["error"] else None,
    }


def _read_ids(request: web.Request) -> list[str] | None:
    ids = request.query.getall("id", [])
    if len(ids) > MAX_PAGE_SIZE or any("\0" in callback_id for callback_id in ids):
        raise BadParameter(f"give at most {MAX_PAGE_SIZE} ids", parameter="id")
    return ids or None


def _read_timestamp(request: web.Request, name: str) -> datetime | None:
    text = text_parameter(request, name)
    try:
        timestamp = datetime.fromisoformat(text) if text else None
    except ValueError:
        timestamp = None
    if text and (timestamp is None or timestamp.tzinfo is None):
        raise BadParameter("must be a time with its zone, such as 2026-11-21T09:30:00Z", parameter=name)
    return timestamp


def _cursor(last: FoundCallback) -> str:
    return f"{last.position.seq} {last.position.target}"


def _read_cursor(request: web.Request) -> Cursor:
    text = text_parameter(request, "cursor", longest=MAX_URL_LENGTH + 20)
    if text is None:
        return Cursor()
    seq, space, target = text.partition(" ")
    if not (space and seq.isascii() and seq.isdigit() and len(seq) < 19):
        raise BadParameter("must be `next` of the page before", parameter="cursor")
    return Cursor(target, int(seq))
