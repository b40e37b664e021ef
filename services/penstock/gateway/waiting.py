"""What waits, and why: the one answer for a task, and the backlog of all."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import asyncpg
from aiohttp import web

from penstock.core.task import Priority, State
from penstock.core.why import Readers, why
from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.gateway.access import among
from penstock.gateway.ownership import require_own
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.tasks import id_of
from penstock.http.problems import BadParameter
from penstock.http.server import number_in_query, refuse_unknown_parameters, respond, text_in_query
from penstock.kafka import readers
from penstock.postgres import backlog
from penstock.postgres import why as postgres_why
from penstock.postgres.backlog import Line, Place

log = logging.getLogger(__name__)

PAGE = 500
LARGEST_PAGE = 1_000
# What Kafka has said of a type holds for so many seconds: a page of a console asks for many tasks at once.
KEEP_S = 1.0
# When Kafka has not answered, nobody waits for it again for so long.
AWAY_S = 5.0


class Waiting:
    """The routes that tell what waits.

    Args:
        settings: where Kafka is.
        pool: of the database.
    """

    def __init__(self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._settings = settings
        self._pool = pool
        # By type, with the moment on the loop's clock.
        self._readers: dict[str, tuple[float, Readers | None]] = {}
        self._asking = asyncio.Lock()
        self._away_s = float("-inf")

    def routes(self) -> list[web.RouteDef]:
        """What this class answers."""
        return [
            web.get("/tasks/{id:[0-9]+}/why", self.why, allow_head=False),
            web.get("/backlog", self.backlog, allow_head=False),
        ]

    async def why(self, request: web.Request) -> web.Response:
        """GET /tasks/{id}/why."""
        refuse_unknown_parameters(request)
        task_id = id_of(request)
        await require_own(request, self._pool, task_id)
        known = await postgres_why.facts(self._pool, task_id)
        facts = known.facts
        if facts.state in (State.READY, State.QUEUED):
            found = await self._readers_of(known.type, known.partitions)
            facts = dataclasses.replace(facts, readers=found)
        told = why(facts)
        return respond(
            {
                "id": task_id,
                "type": known.type,
                "state": facts.state,
                "reason": told.reason,
                "sentence": told.sentence,
                "figures": told.figures,
            }
        )

    async def _readers_of(self, type_name: str, partitions: int) -> Readers | None:
        """What Kafka knows of a type's workers; None when it does not tell, so that the rest is told without it."""
        # One at a time: each opens connections.
        async with self._asking:
            now_s = asyncio.get_running_loop().time()
            at_s, found = self._readers.get(type_name, (float("-inf"), None))
            if now_s - at_s < KEEP_S:
                return found
            if now_s - self._away_s < AWAY_S:
                return None
            try:
                found = await readers.readers(self._settings, type_name, partitions)
            except (KafkaUnavailable, KafkaRefused) as error:
                log.info("%s: who works on it is not known: %s", type_name, error)
                self._away_s = asyncio.get_running_loop().time()
                return None
            self._readers[type_name] = (asyncio.get_running_loop().time(), found)
            return found

    async def backlog(self, request: web.Request) -> web.Response:
        """GET /backlog: by type, priority and stage, from maintained counters."""
        refuse_unknown_parameters(request, "type", "limit", "cursor")
        limit = number_in_query(request, "limit", PAGE, low=1, high=LARGEST_PAGE)
        found = await backlog.lines(
            self._pool,
            type_name=text_in_query(request, "type"),
            among=among(request),
            behind=_place_in(request),
            limit=limit + 1,
        )
        page = found[:limit]
        more = len(found) > limit
        return respond(
            {"backlog": [_shown(line) for line in page], "next": _cursor(page[-1]) if more else None}
        )


def _shown(line: Line) -> dict[str, object]:
    return {**dataclasses.asdict(line), "priority": line.priority.name}


def _cursor(line: Line) -> str:
    # No type has a slash in its name; a stage may have anything.
    return f"{line.type}/{line.priority.name}/{line.stage}"


def _place_in(request: web.Request) -> Place | None:
    text = text_in_query(request, "cursor")
    if text is None:
        return None
    type_name, _, rest = text.partition("/")
    level, slash, stage = rest.partition("/")
    if not slash or level not in Priority.__members__:
        raise BadParameter("must be `next` of the page before", parameter="cursor")
    return Place(type_name, int(Priority[level]), stage)
