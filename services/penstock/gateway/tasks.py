"""Routes of tasks: reading and cancelling."""

from __future__ import annotations

import asyncpg
from aiohttp import web

from penstock.core.task import FINAL, State
from penstock.errors import Conflict, NotFound
from penstock.gateway import views
from penstock.gateway.access import grant_of, visible_types
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.bodies import read_ids
from penstock.gateway.changes import note
from penstock.gateway.end_listener import EndListener
from penstock.gateway.paging import id_cursor, page_size, split_page
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.visibility import require_visible, task_not_found, visible_ids
from penstock.http.preferences import applied, preferred_wait_s
from penstock.http.problems import BadParameter
from penstock.http.server import (
    MAX_ID,
    choice_parameter,
    integer_parameter,
    moment_parameter,
    refuse_unknown_parameters,
    respond,
    text_parameter,
)
from penstock.objects import ObjectStore
from penstock.postgres import advance, progress, task_search, tasks

# Most reports of progress in an answer: more would not fit on a screen.
MAX_REPORTS = 100


class TaskRoutes:
    """The routes below /tasks but for submitting.

    Args:
        settings: the source of events.
        pool: the database.
        objects: has contexts above the inline limit.
        producer: publishes the outbox entries of cancellations.
        ends: wakes requests when their tasks have ended.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        objects: ObjectStore,
        producer: BackgroundProducer,
        ends: EndListener,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._objects = objects
        self._producer = producer
        self._ends = ends

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/tasks", self.find, allow_head=False),
            web.post("/tasks/cancel", self.cancel_many),
            web.post("/tasks/states", self.states),
            web.post("/tasks/ended", self.ended),
            web.post("/tasks/progress", self.progress_of),
            web.get("/tasks/{id:[0-9]+}", self.get, allow_head=False),
            web.post("/tasks/{id:[0-9]+}/cancel", self.cancel),
        ]

    async def get(self, request: web.Request) -> web.Response:
        """GET /tasks/{id}."""
        refuse_unknown_parameters(request, "context")
        resolve = choice_parameter(request, "context", "value", ("value", "ref")) == "value"
        wait_s = preferred_wait_s(request)
        row = await tasks.get(self._pool, id_of(request))
        if not grant_of(request).covers(row["type"]):
            raise task_not_found(row["id"])
        if wait_s and row["state"] not in FINAL:
            await self._ends.wait([row["id"]], wait_s)
            row = await tasks.get(self._pool, row["id"])
        [row] = await progress.added_to(self._pool, [row])
        document = await views.detail(row, self._objects if resolve else None)
        return respond(document, headers=applied(wait_s))

    async def find(self, request: web.Request) -> web.Response:
        """GET /tasks: the newest first."""
        refuse_unknown_parameters(
            request,
            "type",
            "state",
            "stage",
            "key",
            "label",
            "idempotency_key",
            "flow",
            "since",
            "error",
            "limit",
            "cursor",
        )
        size = page_size(request)
        found = await task_search.find(
            self._pool,
            type_name=text_parameter(request, "type"),
            states=read_words(request, "state", tuple(State)),
            stage=text_parameter(request, "stage"),
            labels=read_labels(request),
            idempotency_key=text_parameter(request, "idempotency_key"),
            concurrency_key=text_parameter(request, "key"),
            flow_id=integer_parameter(request, "flow", 0, low=1, high=MAX_ID) or None,
            since=moment_parameter(request, "since"),
            error=text_parameter(request, "error", shortest=0),
            before_id=id_cursor(request),
            limit=size + 1,
            visible_types=visible_types(request),
        )
        page, next_cursor = split_page(found.rows, size, lambda row: str(row["id"]))
        if found.searched_to is not None:
            next_cursor = str(found.searched_to)
        rows = await progress.added_to(self._pool, page)
        return respond({"tasks": [views.summary(row) for row in rows], "next": next_cursor})

    async def states(self, request: web.Request) -> web.Response:
        """POST /tasks/states: how many of the given ids are in each state; the unknown ids."""
        ids, rejected = await read_ids(request)
        visible = await visible_ids(request, self._pool, ids)
        wait_s = preferred_wait_s(request)
        if wait_s:
            await self._ends.wait(visible, wait_s)
        states = await tasks.states_of(self._pool, visible)
        unknown: set[int] = set()
        if sum(states.values()) < len(set(ids)):
            unknown = set(ids) - await tasks.existing_ids(self._pool, visible)
        return respond({"states": states, "unknown": sorted(unknown), **rejected}, headers=applied(wait_s))

    async def ended(self, request: web.Request) -> web.Response:
        """POST /tasks/ended: which of the given tasks have ended, in the order of their ends."""
        ids, rejected = await read_ids(request)
        visible = await visible_ids(request, self._pool, ids)
        wait_s = preferred_wait_s(request)
        ends = await tasks.ends_of(self._pool, visible)
        if wait_s and ends and not any(ends.values()):
            await self._ends.wait(ends, wait_s, first=True)
            ends = await tasks.ends_of(self._pool, visible)
        in_order = sorted((ended_at, task_id) for task_id, ended_at in ends.items() if ended_at)
        unknown = sorted(set(ids) - ends.keys())
        found = {"ended": [task_id for _ended_at, task_id in in_order], "unknown": unknown}
        return respond({**found, **rejected}, headers=applied(wait_s))

    async def progress_of(self, request: web.Request) -> web.Response:
        """POST /tasks/progress: the reports of those of the given tasks that have one."""
        ids, rejected = await read_ids(request)
        visible = await visible_ids(request, self._pool, ids)
        found = await progress.of_tasks(self._pool, visible, most=MAX_REPORTS)
        reports = [{"id": task_id, "progress": report} for task_id, report in found.items()]
        return respond({"tasks": reports, **rejected})

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /tasks/{id}/cancel."""
        task_id = id_of(request)
        await require_visible(request, self._pool, task_id)
        cancelled, outbox_entry = await advance.cancel(
            self._pool, [task_id], source=self._settings.event_source
        )
        self._producer.enqueue(outbox_entry)
        if not cancelled:
            state = (await tasks.get(self._pool, task_id))["state"]
            if state != State.CANCELLED:
                raise Conflict(
                    f"task {task_id} has already {_participle(state)}: it can no longer be cancelled"
                )
        note(request, cancelled=[task_id] if cancelled else [])
        return respond({"id": task_id, "state": State.CANCELLED, "cancelled": bool(cancelled)})

    async def cancel_many(self, request: web.Request) -> web.Response:
        """POST /tasks/cancel: answers which ids were cancelled, final or unknown."""
        ids, rejected = await read_ids(request)
        visible = await visible_ids(request, self._pool, ids)
        cancelled, outbox_entry = await advance.cancel(
            self._pool, visible, source=self._settings.event_source
        )
        self._producer.enqueue(outbox_entry)
        note(request, cancelled=sorted(set(cancelled)))
        remaining = set(ids) - set(cancelled)
        ended = await tasks.existing_ids(self._pool, remaining & set(visible)) if remaining else set()
        return respond(
            {
                "cancelled": sorted(set(cancelled)),
                "unchanged": sorted(ended),
                "unknown": sorted(remaining - ended),
                **rejected,
            }
        )


def id_of(request: web.Request, noun: str = "task") -> int:
    """The id in the path of a request.

    Args:
        request: to a route with an id.
        noun: of what has the id.

    Raises:
        NotFound: it is larger than any id.
    """
    text = request.match_info["id"]
    if len(text) > 19 or int(text) > MAX_ID:
        raise NotFound(f"there is no {noun} {text[:40]}")
    return int(text)


def _participle(state: str) -> str:
    return {"quarantined": "been quarantined"}.get(state, state)


def read_words(request: web.Request, name: str, known: tuple[str, ...]) -> list[str]:
    """The words of a request's parameters of this name, each with one or several of `known`.

    Raises:
        BadParameter: one is another word.
    """
    words = [word for text in request.query.getall(name, []) for word in text.split(",")]
    for word in words:
        if word not in known:
            raise BadParameter(f"must be of: {', '.join(known)}", parameter=name)
    return words


def read_labels(request: web.Request) -> dict[str, str]:
    """The labels of a request's parameters `label=name:value`.

    Raises:
        BadParameter: one has another form.
    """
    labels = {}
    for text in request.query.getall("label", []):
        name, colon, value = text.partition(":")
        if not colon or not name or "\0" in text:
            raise BadParameter("must be name:value", parameter="label")
        labels[name] = value
    return labels
