"""The overview: what waits, what has ended, and what may need an operator.

All readers of the same namespaces share one answer a second. Ends of tasks are read once for all of
them, and less often while there are many.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import asyncpg
from aiohttp import web

import penstock
from penstock.core.access import Grant
from penstock.core.recent_ends import RecentEnds
from penstock.core.worker_list import Seen, WorkerList
from penstock.errors import PenstockError
from penstock.gateway.access import grant_of, visible_types
from penstock.gateway.visibility import visible_namespaces
from penstock.http.server import refuse_unknown_parameters, respond
from penstock.metrics.server import Probe, readiness
from penstock.postgres import backlog, overview
from penstock.postgres.backlog import STATES
from penstock.postgres.read_pool import reading
from penstock.postgres.types import TypeCache

# Seconds for which an answer and the probes of the servers are shared.
SHARED_S = 1.0
PROBES_S = 5.0
# Nothing is counted further.
MOST = 1_000
# Seconds of ends that one statement reads; a multiple of the parts in which they are counted.
_READ_S = 60.0
# A read of ends is followed by a pause of so many times its duration.
_PAUSES = 20
# Sets of namespaces whose answers are kept.
_MOST_ANSWERS = 200


class OverviewRoutes:
    """The route of the overview.

    Args:
        pool: the database.
        types: the registered types.
        workers: all workers that write signs of life.
        probes: of the servers that a gateway needs.
        show_reasons: whether the answer has the reasons of probes, which name servers.
    """

    def __init__(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        types: TypeCache,
        workers: WorkerList,
        probes: Mapping[str, Probe],
        *,
        show_reasons: bool,
    ) -> None:
        self._pool = pool
        self._types = types
        self._workers = workers
        self._probes = probes
        self._show_reasons = show_reasons
        self._lock = asyncio.Lock()
        # A failure is shared for as long as an answer, so that waiting readers do not repeat it.
        self._failure: tuple[float, PenstockError] | None = None
        self._answers: OrderedDict[frozenset[str] | None, tuple[float, dict[str, Any]]] = OrderedDict()
        self._ends = RecentEnds()
        self._ends_s = 0.0
        self._ends_at_s = float("-inf")
        self._services: dict[str, str] = {}
        self._services_at_s = float("-inf")

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.get("/overview", self.overview, allow_head=False)]

    async def overview(self, request: web.Request) -> web.Response:
        """GET /overview."""
        refuse_unknown_parameters(request)
        grant = grant_of(request)
        async with self._lock:
            at_s, document = self._answers.get(grant.namespaces, (float("-inf"), {}))
            if _now_s() - at_s > SHARED_S:
                # Not among the lists of the first reader: all others wait for this answer.
                with reading("overview", lists=False):
                    document = await self._read_once(request, grant)
                self._answers[grant.namespaces] = (_now_s(), document)
                self._answers.move_to_end(grant.namespaces)
                if len(self._answers) > _MOST_ANSWERS:
                    self._answers.popitem(last=False)
        return respond(document)

    async def _read_once(self, request: web.Request, grant: Grant) -> dict[str, Any]:
        if self._failure is not None and _now_s() - self._failure[0] <= SHARED_S:
            raise self._failure[1]
        self._failure = None
        try:
            return await self._read(request, grant)
        except PenstockError as error:
            self._failure = _now_s(), error
            raise

    async def _read(self, request: web.Request, grant: Grant) -> dict[str, Any]:
        await self._types.require(())
        await self._read_ends()
        await self._read_services()
        entries = await backlog.entries(self._pool, among=visible_types(request))
        counts = await overview.counts(self._pool, visible_namespaces(request), MOST)
        by_type = self._workers.by_type(_now_s())
        sums: dict[str, Counter[str]] = {}
        oldest: dict[str, float] = {}
        for entry in entries:
            sums.setdefault(entry.type, Counter()).update({state: getattr(entry, state) for state in STATES})
            if entry.oldest_s is not None:
                oldest[entry.type] = max(entry.oldest_s, oldest.get(entry.type, 0.0))
        return {
            "at": datetime.now(UTC),
            "version": penstock.__version__,
            "types": [
                {
                    "type": each.name,
                    **{state: sums.get(each.name, Counter())[state] for state in STATES},
                    "oldest_s": oldest.get(each.name),
                    "is_paused": bool(each.paused),
                    "workers": self._running(by_type.get(each.name, ())),
                }
                for each in self._types
                if grant.covers(each.name)
            ],
            "minutes": self._minutes(grant.covers),
            "callbacks": {name: counts[name] for name in ("abnormal", "disabled", "dead")},
            "flows": {"running": counts["flows_running"], "failed": counts["flows_failed"]},
            "operations": counts["operations_running"],
            "workers": _workers(by_type, grant.covers),
            "services": self._services,
        }

    def _running(self, seen: Any) -> int | None:
        """Running workers of a type; None before the first sign of life of any worker."""
        if self._workers.newest_ms is None:
            return None
        return sum(not each.lost for each in seen)

    def _minutes(self, covers: Callable[[str], bool]) -> list[dict[str, Any]]:
        return [
            {
                "at": datetime.fromtimestamp(at_s, UTC),
                **{name: counts[name] for name in ("succeeded", "failed", "cancelled")},
            }
            for at_s, counts in self._ends.minutes(self._ends_s, covers)
        ]

    async def _read_ends(self) -> None:
        begin_s = _now_s()
        if begin_s < self._ends_at_s:
            return
        now_s = await overview.now_s(self._pool)
        until_s = 0.0
        # A gateway that has just begun reads 15 minutes, and keeps each if a later one fails.
        while until_s <= now_s:
            since_s = self._ends.wanted_s(now_s)
            until_s = since_s + _READ_S
            self._ends.put(await overview.ends(self._pool, since_s, until_s), until_s, now_s)
        self._ends_s = now_s
        self._ends_at_s = _now_s() + max(SHARED_S, _PAUSES * (_now_s() - begin_s))

    async def _read_services(self) -> None:
        if _now_s() < self._services_at_s + PROBES_S:
            return
        document, _ = await readiness(self._probes)
        self._services = {
            name: reason if reason == "ok" or self._show_reasons else "unavailable"
            for name, reason in document["checks"].items()
        }
        self._services_at_s = _now_s()


def _workers(by_type: Mapping[str, list[Seen]], covers: Callable[[str], bool]) -> dict[str, int]:
    running, lost = set[str](), set[str]()
    for name, seen in by_type.items():
        if covers(name):
            for each in seen:
                (lost if each.lost else running).add(each.status.id)
    return {"running": len(running), "lost": len(lost)}


def _now_s() -> float:
    return asyncio.get_running_loop().time()
