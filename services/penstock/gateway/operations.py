"""Cancelling, pausing, resuming, re-prioritising and recovering tasks by filter.

What this module guarantees: what `POST /operations` acknowledges is written down and goes on until it has ended or is
stopped, whether its client stays or not: here, or after a crash in whichever gateway looks next. Every task that matches
when its turn comes is changed once and counted once (`penstock.postgres.operations`). In doubt it waits: while PostgreSQL
is away nothing goes on. A batch that PostgreSQL refuses for good ends its operation, which says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.core.access import Grant
from penstock.core.operations import Verb
from penstock.core.task import Priority, State
from penstock.errors import Conflict, InvalidRecord, NotFound, PostgresUnavailable
from penstock.gateway import views
from penstock.gateway.access import grant_of
from penstock.gateway.broker import Broker
from penstock.gateway.openapi import conform
from penstock.gateway.ownership import own
from penstock.gateway.rehearsal import COUNTED, SHOWN, moment_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.tasks import json_of
from penstock.http.server import (
    LARGEST_ID,
    choice_in_query,
    number_in_query,
    refuse_unknown_parameters,
    respond,
)
from penstock.postgres import operations, tasks
from penstock.postgres.operations import Which

log = logging.getLogger(__name__)

STATES = ("running", "done", "stopped", "failed")
PAGE = 50
LARGEST_PAGE = 500
# Most tasks a dry run looks at: beyond, what it counts is a lower bound.
LOOKED_AT = 1_000_000
# How often a gateway looks for what another one has left; its own it goes on with at once.
ADOPT_S = 10.0
AGAIN_S = 1.0

# Characters of namespaces in an id; longer ones are kept as their digest.
LONGEST_SCOPE = 200

# Of no task: a filter names some id.
NOBODYS_ID = LARGEST_ID

_SAME = ("verb", "rate", "state", "changed", "stopped_by", "error", "created_at", "finished_at")


class Operations:
    """The routes below /operations, and going on with what was asked there.

    Args:
        settings: limits.
        pool: of the database.
        broker: publishes what cancelling owes.
    """

    def __init__(self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record], broker: Broker) -> None:
        self._settings = settings
        self._pool = pool
        self._broker = broker
        # When each is gone on with, by the loop's clock.
        self._due: dict[str, float] = {}
        self._which: dict[str, Which] = {}
        self._woken = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        """What this class answers."""
        return [
            web.post("/operations", self.begin),
            web.get("/operations", self.find, allow_head=False),
            web.get("/operations/{id}", self.get, allow_head=False),
            web.post("/operations/{id}/stop", self.stop),
        ]

    async def begin(self, request: web.Request) -> web.Response:
        """POST /operations: the first batch is done when it is answered, unless another has begun it before."""
        refuse_unknown_parameters(request)
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "OperationRequest")
        verb = Verb(raw["verb"])
        await self._confine(request, raw["filter"])
        which = which_of(raw["filter"])
        priority = _priority(raw, verb)
        if not which.states_for(verb):
            raise InvalidRecord(f"nothing in these states can be done: {verb}", pointer="/filter/states")
        if raw.get("dry_run"):
            return respond(await self._rehearse(verb, which, priority))
        grant = grant_of(request)
        shown = raw.get("id") or uuid.uuid4().hex
        filter_json = orjson.dumps(raw["filter"], option=orjson.OPT_SORT_KEYS).decode()
        for operation_id in _kept_as(shown, grant):
            row = await operations.begin(
                self._pool,
                operation_id,
                verb,
                raw["by"],
                filter_json,
                priority,
                raw.get("rate"),
                actor=grant.actor or None,
                namespaces=grant.namespaces,
            )
            created = row is not None
            row = row or await operations.get(self._pool, operation_id)
            if row is not None and _visible(row, grant):
                break
        assert row is not None
        asked = (verb.value, raw["filter"], priority, raw.get("rate"))
        if not created and (row["verb"], orjson.loads(row["filter"]), row["priority"], row["rate"]) != asked:
            raise Conflict(f"operation {shown} is another one: give it an id of its own")
        self._which[operation_id] = which
        self._due[operation_id] = 0.0
        if created:
            log.info(
                "operation %s: %s, asked by %s: %s",
                operation_id,
                verb,
                raw["by"],
                filter_json,
                extra={"operation": operation_id},
            )
            row = await self._begun(row)
        self._woken.set()
        headers = {"Location": f"/operations/{shown}"}
        return respond(_document(row, grant), 201 if created else 200, headers)

    async def _begun(self, row: asyncpg.Record) -> asyncpg.Record:
        try:
            await self._go_on(row["id"])
            return await operations.get(self._pool, row["id"]) or row
        except PostgresUnavailable as error:
            # It is written down, and goes on.
            log.warning("operation %s waits: %s", row["id"], error)
            return row

    async def _rehearse(self, verb: Verb, which: Which, priority: int | None) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        shown: list[int] = []
        behind, looked, ended = 0, 0, False
        while not ended and looked < LOOKED_AT and counts.total() < COUNTED:
            found = await operations.look(
                self._pool,
                verb,
                which,
                behind=behind,
                upto=LARGEST_ID,
                limit=COUNTED - counts.total(),
                priority=priority,
            )
            counts.update(found.states.values())
            shown += [*found.states][: SHOWN - len(shown)]
            behind, looked, ended = found.reached or behind, looked + found.looked, found.ended
        rows = await tasks.some(self._pool, shown)
        return {
            "dry_run": True,
            "verb": verb.value,
            "count": counts.total(),
            "found_in": dict(counts),
            "more": not ended,
            "examples": [views.summary(dict(row)) for row in rows],
        }

    async def find(self, request: web.Request) -> web.Response:
        """GET /operations: the audit, latest first."""
        refuse_unknown_parameters(request, "verb", "state", "limit", "cursor")
        limit = number_in_query(request, "limit", PAGE, low=1, high=LARGEST_PAGE)
        before = number_in_query(request, "cursor", 0, low=1, high=LARGEST_ID)
        rows = await operations.find(
            self._pool,
            verb=choice_in_query(request, "verb", "", (*Verb, "")) or None,
            state=choice_in_query(request, "state", "", (*STATES, "")) or None,
            before=before or None,
            limit=limit + 1,
            namespaces=grant_of(request).namespaces,
        )
        page = rows[:limit]
        return respond(
            {
                "operations": [_document(row, grant_of(request)) for row in page],
                "next": str(page[-1]["seq"]) if len(rows) > limit else None,
            }
        )

    async def get(self, request: web.Request) -> web.Response:
        """GET /operations/{id}."""
        refuse_unknown_parameters(request)
        return respond(_document(await self._row(request), grant_of(request)))

    async def stop(self, request: web.Request) -> web.Response:
        """POST /operations/{id}/stop: what it has done stays done."""
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "OperationStop")
        row = await self._row(request)
        await operations.stop(self._pool, row["id"], raw["by"])
        return respond(_document(await self._row(request), grant_of(request)))

    async def _row(self, request: web.Request) -> asyncpg.Record:
        shown, grant = request.match_info["id"], grant_of(request)
        # Latest first: an id of its own was given because the one that was asked for is somebody else's.
        for operation_id in [] if "\0" in shown else reversed(_kept_as(shown, grant)):
            row = await operations.get(self._pool, operation_id)
            if row is not None and _visible(row, grant):
                return row
        raise NotFound(f"there is no operation {shown[:80]!r}")

    async def _confine(self, request: web.Request, raw: dict[str, Any]) -> None:
        """Sees to it that a filter, whoever goes on with it, meets only tasks of whoever asks.

        By its type, or by its ids, which are narrowed down to those: a type never changes, so once is enough; and gateways of
        an earlier version go on with such a filter as they do with any.
        """
        grant = grant_of(request)
        if grant.namespaces is None:
            return
        if "type" in raw:
            if not grant.covers(raw["type"]):
                # As with a type that is not there: nothing matches.
                raw["ids"] = [NOBODYS_ID]
        elif "ids" in raw:
            visible = await own(request, self._pool, sorted({int(one) for one in raw["ids"]}))
            raw["ids"] = list(visible) or [NOBODYS_ID]
        else:
            raise InvalidRecord(
                "name a type or ids: you may change tasks of some namespaces only", pointer="/filter"
            )

    async def run(self) -> None:
        """Goes on with what is written down, a batch of each in turn, until cancelled."""
        loop = asyncio.get_running_loop()
        adopt_at = 0.0
        while True:
            self._woken.clear()
            try:
                if loop.time() >= adopt_at:
                    await self._adopt()
                    adopt_at = loop.time() + ADOPT_S
                for operation_id, due in [*self._due.items()]:
                    if due <= loop.time():
                        await self._go_on(operation_id)
            except PostgresUnavailable as error:
                # Nothing was changed, or all of a batch: the row tells which.
                log.warning("operations wait: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            next_at = min([adopt_at, *self._due.values()])
            try:
                await asyncio.wait_for(self._woken.wait(), max(0.0, next_at - loop.time()))
            except TimeoutError:
                continue

    async def _adopt(self) -> None:
        while found := await operations.running(self._pool, [*self._due]):
            for operation_id in found:
                row = await operations.get(self._pool, operation_id)
                assert row is not None
                log.info("going on with operation %s (%s)", operation_id, row["verb"])
                self._which[operation_id] = which_of(orjson.loads(row["filter"]))
                self._due[operation_id] = 0.0

    async def _go_on(self, operation_id: str) -> None:
        loop = asyncio.get_running_loop()
        which = self._which.get(operation_id)
        if which is None:
            # It has ended elsewhere: in the request that began it, or in the loop. Who was at it besides may have put it back.
            self._due.pop(operation_id, None)
            return
        try:
            step = await operations.go_on(self._pool, operation_id, which, source=self._settings.event_source)
        except asyncpg.PostgresError as error:
            # Not one that passes (these are `PostgresUnavailable`): the next batch would meet it again.
            log.exception("operation %s fails", operation_id)
            await operations.fail(self._pool, operation_id, f"{type(error).__name__}: {error}")
            wait_s = None
        else:
            self._broker.owe(step.owed)
            wait_s = step.wait_s
        if wait_s is None:
            self._due.pop(operation_id, None)
            self._which.pop(operation_id, None)
        else:
            self._due[operation_id] = loop.time() + wait_s


def which_of(raw: dict[str, Any]) -> Which:
    """A filter of the API that conforms to its schema.

    Raises:
        InvalidRecord: there is no such moment.
    """

    def moment(name: str) -> Any:
        return moment_of(raw, name, "/filter")

    return Which(
        # JSON Schema counts 81.0 among the integers.
        ids=sorted({int(one) for one in raw["ids"]}) if "ids" in raw else None,
        type=raw.get("type"),
        stage=raw.get("stage"),
        states=[State(state) for state in raw["states"]] if "states" in raw else None,
        key=raw.get("key"),
        labels=raw.get("labels"),
        priorities=[int(Priority[name]) for name in raw["priorities"]] if "priorities" in raw else None,
        created_since=moment("created_since"),
        created_until=moment("created_until"),
        finished_since=moment("finished_since"),
        finished_until=moment("finished_until"),
        error=raw.get("error"),
    )


def _priority(raw: dict[str, Any], verb: Verb) -> int | None:
    if (verb is Verb.REPRIORITISE) != ("priority" in raw):
        raise InvalidRecord("the new priority, which belongs to reprioritise alone", pointer="/priority")
    return int(Priority[raw["priority"]]) if "priority" in raw else None


def _visible(row: asyncpg.Record, grant: Grant) -> bool:
    if grant.namespaces is None:
        return True
    return row["namespaces"] is not None and grant.namespaces.issuperset(row["namespaces"])


def _kept_as(shown: str, grant: Grant) -> Sequence[str]:
    """Under which ids an operation of this id may be kept.

    As it is; and where that is taken by an operation that whoever asks may not see, with the namespaces of the grant, so that an
    id which somebody else has chosen is as free as any. No id that is asked for has the @ of those.
    """
    if grant.namespaces is None:
        return (shown,)
    return (shown, shown + _scope(grant.namespaces))


def _scope(namespaces: Collection[str]) -> str:
    named = ".".join(sorted(namespaces))
    if len(named) > LONGEST_SCOPE:
        named = hashlib.sha256(named.encode()).hexdigest()
    return f"@{named}"


def _document(row: asyncpg.Record, grant: Grant) -> dict[str, Any]:
    shown: str = row["id"] if grant.namespaces is None else row["id"].removesuffix(_scope(grant.namespaces))
    return {
        **{name: row[name] for name in _SAME},
        "id": shown,
        "by": row["asked_by"],
        "actor": row["actor"],
        "filter": orjson.loads(row["filter"]),
        "priority": Priority(row["priority"]).name if row["priority"] is not None else None,
        "found_in": orjson.loads(row["found_in"]),
    }
