"""Why a task waits, and the backlog of all types."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import asyncpg
from aiohttp import web

from penstock.core.task import Priority, State
from penstock.core.why import GroupLag, TaskWhy, why
from penstock.errors import KafkaRefused, KafkaUnavailable, NotFound
from penstock.gateway.access import visible_types
from penstock.gateway.paging import page_size, respond_page
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.tasks import id_of
from penstock.gateway.visibility import require_visible
from penstock.http.problems import BadParameter
from penstock.http.server import refuse_unknown_parameters, respond, text_parameter
from penstock.kafka.topology import group_lag
from penstock.postgres import backlog
from penstock.postgres import why as postgres_why
from penstock.postgres.backlog import BacklogEntry, BacklogPosition
from penstock.postgres.types import all_types

log = logging.getLogger(__name__)

PAGE_SIZE = 500
MAX_PAGE_SIZE = 1_000
# How long the workers and the lag of a type are cached, since a console asks about many tasks at
# once.
LAG_CACHE_S = 1.0
# How long requests are answered without the lag after Kafka did not answer.
LAG_RETRY_S = 5.0


class TaskExplainer:
    """Explains why tasks wait, for the routes about tasks and flows.

    Args:
        settings: address of Kafka.
        pool: the database.
    """

    def __init__(self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._settings = settings
        self._pool = pool
        # By type, and whether with positions: when the workers were looked up, on the loop's clock,
        # and the result.
        self._workers: dict[tuple[str, bool], tuple[float, GroupLag | None]] = {}
        self._looking_up = asyncio.Lock()
        self._failed_at_s = float("-inf")

    async def explain(self, task_id: int) -> TaskWhy:
        """Why a task waits, or what it does.

        Raises:
            NotFound: no task has this id.
            PostgresUnavailable: the database is unavailable.
        """
        task = await postgres_why.facts(self._pool, task_id)
        facts = task.facts
        if facts.state in (State.READY, State.QUEUED):
            queued = facts.state is State.QUEUED
            workers = await self._workers_of(task.type, task.partitions, positions=queued)
            position = workers.positions.get(task.attempt_id) if workers is not None else None
            facts = dataclasses.replace(facts, group=workers, position=position)
        return TaskWhy(task_id, task.type, facts.state, why(facts))

    async def _workers_of(self, type_name: str, partitions: int, *, positions: bool) -> GroupLag | None:
        """The workers of a type and their lag, from Kafka; None when Kafka does not answer.

        Fails open: the answer then has the other facts.
        """
        # One lookup at a time, since each opens connections.
        async with self._looking_up:
            loop = asyncio.get_running_loop()
            now_s = loop.time()
            cached_at_s, workers = self._workers.get((type_name, positions), (float("-inf"), None))
            if now_s - cached_at_s < LAG_CACHE_S:
                return workers
            if now_s - self._failed_at_s < LAG_RETRY_S:
                return None
            try:
                workers = await group_lag.readers(self._settings, type_name, partitions, positions=positions)
            except (KafkaUnavailable, KafkaRefused) as error:
                log.info(
                    "The workers of a type are unknown",
                    extra={"event": "workers_lookup_failed", "task_type": type_name, "error": error},
                )
                self._failed_at_s = loop.time()
                return None
            self._workers[type_name, positions] = (loop.time(), workers)
            return workers


def why_document(task: TaskWhy) -> dict[str, Any]:
    """The `Why` document about a task."""
    return {
        "id": task.id,
        "type": task.type,
        "state": task.state,
        "reason": task.answer.reason,
        "sentence": task.answer.sentence,
        "figures": task.answer.figures,
    }


class BacklogRoutes:
    """The routes about waiting tasks.

    Args:
        pool: the database.
        explainer: explains one task.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], explainer: TaskExplainer) -> None:
        self._pool = pool
        self._explainer = explainer

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/tasks/{id:[0-9]+}/why", self.why, allow_head=False),
            web.get("/backlog", self.backlog, allow_head=False),
        ]

    async def why(self, request: web.Request) -> web.Response:
        """GET /tasks/{id}/why."""
        refuse_unknown_parameters(request)
        task_id = id_of(request)
        await require_visible(request, self._pool, task_id)
        return respond(why_document(await self._explainer.explain(task_id)))

    async def backlog(self, request: web.Request) -> web.Response:
        """GET /backlog: counters of tasks by type, priority and stage."""
        refuse_unknown_parameters(request, "type", "limit", "cursor")
        size = page_size(request, default=PAGE_SIZE, largest=MAX_PAGE_SIZE)
        name, visible = text_parameter(request, "type"), visible_types(request)
        if name is not None and name not in (await all_types(self._pool) if visible is None else visible):
            raise NotFound(f"there is no task type {name!r}")
        rows = await backlog.entries(
            self._pool,
            type_name=name,
            among=visible,
            behind=_read_cursor(request),
            limit=size + 1,
        )
        return respond_page("backlog", rows, size, _cursor, _document)


def _document(row: BacklogEntry) -> dict[str, object]:
    return {**dataclasses.asdict(row), "priority": row.priority.name}


def _cursor(row: BacklogEntry) -> str:
    # The name of a type has no slash; a stage may have any character.
    return f"{row.type}/{row.priority.name}/{row.stage}"


def _read_cursor(request: web.Request) -> BacklogPosition | None:
    cursor = text_parameter(request, "cursor")
    if cursor is None:
        return None
    type_name, _, rest = cursor.partition("/")
    priority, slash, stage = rest.partition("/")
    if not slash or priority not in Priority.__members__:
        raise BadParameter("must be `next` of the page before", parameter="cursor")
    return BacklogPosition(type_name, int(Priority[priority]), stage)
