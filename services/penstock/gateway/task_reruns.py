"""The route that runs a task again from one of its stages.

A rerun is a new task, so the events, callbacks and the result of the first one stay true.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock import tracing
from penstock.contracts import subscription
from penstock.contracts.submission import Submission
from penstock.core.access import namespace_of
from penstock.core.task import FINAL, Priority
from penstock.errors import CorruptObject, Invalid, RerunRefused, TooLarge
from penstock.gateway.access import grant_of
from penstock.gateway.bodies import read_json
from penstock.gateway.changes import note
from penstock.gateway.openapi import conform
from penstock.gateway.tasks import id_of
from penstock.gateway.views import MAX_CONTEXT_BYTES
from penstock.gateway.visibility import task_not_found
from penstock.http.server import refuse_unknown_parameters, respond
from penstock.objects import ObjectStore
from penstock.postgres import tasks
from penstock.postgres.timeline import KEPT_INPUTS, Step, steps_of
from penstock.postgres.types import TypeCache
from penstock.submission import TaskKind
from penstock.submission.kind import traced


class TaskRerunRoutes:
    """The route /tasks/{id}/rerun.

    Args:
        pool: the database.
        types: the registered types.
        objects: has large inputs.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], types: TypeCache, objects: ObjectStore) -> None:
        self._pool = pool
        self._types = types
        self._objects = objects

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.post("/tasks/{id:[0-9]+}/rerun", self.rerun)]

    async def rerun(self, request: web.Request) -> web.Response:
        """POST /tasks/{id}/rerun: a new task in a stage of an ended one, with the stage's input."""
        refuse_unknown_parameters(request)
        raw: dict[str, Any] = await read_json(request) if request.can_read_body else {}
        conform(raw, "TaskRerun")
        row = await tasks.get(self._pool, id_of(request))
        if not grant_of(request).covers(row["type"]):
            raise task_not_found(row["id"])
        submission = _repeated(row, raw.get("from"), raw.get("idempotency_key"))
        parent = request.headers.get(tracing.TRACEPARENT)
        with tracing.span("rerun", parent, kind="server", root=True, task=row["id"]) as span:
            found = await self._submit(traced(submission, span.traceparent if span else None))
        note(request, task=found.id, rerun_of=row["id"], stage=submission.stage, created=found.created)
        return respond(
            {"id": found.id, "created": found.created, "stage": submission.stage, "rerun_of": row["id"]},
            201 if found.created else 200,
            {"Location": f"/tasks/{found.id}"},
        )

    async def _submit(self, submission: Submission) -> tasks.Submitted:
        kind = TaskKind(self._types, self._objects)
        [item] = await kind.admit([submission])
        if isinstance(item, Invalid):
            raise item
        [found] = await kind.insert(self._pool, [await kind.store(await self._fetched(item))])
        if isinstance(found, Invalid):
            raise found
        return found

    async def _fetched(self, submission: Submission) -> Submission:
        """The submission with the value of a large input, to be stored again.

        The store deletes objects by age, and the new task begins to need this one now. An input
        that is too large for this process stays a reference.
        """
        try:
            context = await self._objects.check_out(
                submission.context, namespace_of(submission.type), limit_bytes=MAX_CONTEXT_BYTES
            )
        except CorruptObject as error:
            raise RerunRefused(
                f"the input of stage {submission.stage!r} cannot be read: {error}", code="input_missing"
            ) from error
        except TooLarge:
            return submission
        return dataclasses.replace(submission, context=context)


def _repeated(row: Mapping[str, Any], stage: str | None, idempotency_key: str | None) -> Submission:
    """The submission that repeats a task from a stage; None is its first stage.

    Raises:
        RerunRefused: it cannot be repeated from there.
    """
    if row["flow_id"] is not None:
        raise RerunRefused(
            f"task {row['id']} belongs to flow {row['flow_id']}, which would not receive the end of another "
            "task: rerun or recover the flow",
            code="of_flow",
        )
    if row["state"] not in FINAL:
        raise RerunRefused(
            f"task {row['id']} is {row['state']}: wait for its end, or cancel it first", code="not_ended"
        )
    step = _entered(row, stage)
    if step.input is None:
        raise RerunRefused(
            f"the input of stage {step.stage!r} of task {row['id']} was not kept: it is kept of the first "
            f"{KEPT_INPUTS} stages, since the version with timelines. Submit a new task",
            code="input_not_kept",
        )
    return Submission(
        type=row["type"],
        stage=step.stage,
        context=step.input,
        priority=Priority(row["priority"]),
        key=row["key"] or None,
        idempotency_key=idempotency_key,
        events=row["events"],
        labels=orjson.loads(row["labels"]) if row["labels"] else {},
        callbacks=subscription.from_columns(row["callbacks"]),
        rerun_of=row["id"],
    )


def _entered(row: Mapping[str, Any], stage: str | None) -> Step:
    """The step in which a task entered a stage for the first time."""
    steps = steps_of(row)
    for step in steps:
        if stage in (None, step.stage):
            return step
    entered = ", ".join(dict.fromkeys(step.stage for step in steps))
    raise RerunRefused(
        f"task {row['id']} has not entered stage {stage!r}, but {entered}", code="stage_not_reached"
    )
