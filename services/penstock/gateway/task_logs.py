"""Routes of task logs: what handlers have logged, while they run and afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.core.log_chunk import Chunk, RunCursors
from penstock.core.log_view import (
    LEVELS,
    LOST,
    LastLines,
    LineFilter,
    gap_document,
    line_documents,
    mark_document,
    text_of,
)
from penstock.errors import NotFound
from penstock.gateway import changes
from penstock.gateway.access import grant_of
from penstock.gateway.log_attempts import missing_end, require_attempt, state_of
from penstock.gateway.log_follower import Follower
from penstock.gateway.log_source import Attempt, LogSource
from penstock.gateway.tasks import id_of
from penstock.gateway.visibility import require_visible, task_not_found
from penstock.http.problems import BadParameter
from penstock.http.server import (
    choice_parameter,
    integer_parameter,
    moment_parameter,
    refuse_unknown_parameters,
    respond,
    text_parameter,
)
from penstock.postgres import task_logs, tasks

MAX_LINES = 1_000_000
MAX_TAIL = 10_000
_WRITE_BYTES = 64 * 1024
_EPOCH = datetime.fromtimestamp(0, UTC)


class TaskLogRoutes:
    """The routes of logs.

    Args:
        pool: the database.
        source: reads logs.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], source: LogSource) -> None:
        self._pool = pool
        self._source = source

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/tasks/{id:[0-9]+}/logs", self.list_runs, allow_head=False),
            web.delete("/tasks/{id:[0-9]+}/logs", self.delete),
            web.get("/tasks/{id:[0-9]+}/logs/{step:[0-9]+}/{attempt:[0-9]+}", self.read, allow_head=False),
        ]

    async def list_runs(self, request: web.Request) -> web.Response:
        """GET /tasks/{id}/logs: the runs of a task, and the totals of each."""
        refuse_unknown_parameters(request)
        row = await self._row(request)
        found = await self._source.summaries(row)
        documents = [
            {**summary.document(), **state_of(row, summary.run.step, summary.run.attempt, ended=summary.end)}
            for summary in sorted(
                found.values(), key=lambda each: (each.run.step, each.run.attempt, each.first_ms)
            )
        ]
        return respond({"id": row["id"], "state": row["state"], "runs": documents})

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /tasks/{id}/logs: hides the log at once; its lines go with their segments."""
        refuse_unknown_parameters(request)
        task_id = id_of(request)
        await require_visible(request, self._pool, task_id)
        await tasks.get(self._pool, task_id)
        await task_logs.delete_log(self._pool, task_id)
        changes.note(request, deleted="log")
        return respond({"id": task_id, "deleted": True})

    async def read(self, request: web.Request) -> web.StreamResponse:
        """GET /tasks/{id}/logs/{step}/{attempt}: its lines, or with follow also those to come."""
        refuse_unknown_parameters(
            request, "from", "limit", "tail", "level", "q", "run", "format", "follow", "since"
        )
        default = "true" if "text/event-stream" in request.headers.get("Accept", "") else "false"
        follows = choice_parameter(request, "follow", default, ("true", "false")) == "true"
        as_text = choice_parameter(request, "format", "ndjson", ("ndjson", "text")) == "text"
        lines = _filter_of(request)
        last = integer_parameter(request, "tail", 0, low=1, high=MAX_TAIL)
        limit = integer_parameter(request, "limit", MAX_LINES, low=1, high=MAX_LINES)
        if last and ("from" in request.query or "limit" in request.query):
            raise BadParameter("cannot be combined with from or limit", parameter="tail")
        row = await self._row(request)
        attempt = _number(request, "step"), _number(request, "attempt")
        require_attempt(row, *attempt)
        if follows:
            return await Follower(self._source, self._pool, request, row, attempt, lines).run(last)
        documents = self._last(row, attempt, lines, last) if last else self._lines(row, attempt, lines, limit)
        return await _stream(request, documents, as_text=as_text)

    async def _row(self, request: web.Request) -> dict[str, Any]:
        row = await tasks.get(self._pool, id_of(request))
        if not grant_of(request).covers(row["type"]):
            raise task_not_found(row["id"])
        if await task_logs.is_deleted(self._pool, row["id"]):
            raise NotFound(f"the log of task {row['id']} was deleted")
        return row

    async def _lines(
        self, row: Mapping[str, Any], attempt: Attempt, lines: LineFilter, limit: int
    ) -> AsyncIterator[dict[str, Any]]:
        """The documents of at most `limit` lines."""
        count = 0
        async with aclosing(self._documents(row, attempt, lines)) as documents:
            async for document in documents:
                yield document
                count += 1
                if count == limit:
                    return

    async def _last(
        self, row: Mapping[str, Any], attempt: Attempt, lines: LineFilter, last: int
    ) -> AsyncIterator[dict[str, Any]]:
        kept = LastLines[dict[str, Any]](last, lambda document: len(document["text"]))
        # A filter needs all lines: its matches are not in the indexes.
        needed = last if lines == LineFilter() else 0
        async for document in self._documents(row, attempt, lines, needed):
            kept.extend([document])
        for document in kept.taken():
            yield document

    async def _documents(
        self, row: Mapping[str, Any], attempt: Attempt, lines: LineFilter, last: int = 0
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The documents of the wanted lines, with marks for those that are missing.

        With `last`, those before the last so many lines may be missing without a mark.
        """
        cursors = RunCursors()
        async for chunk in self._source.chunks(row, attempt, lines.first, last, lines.since_ms):
            if not lines.wants_run(chunk.run.run):
                continue
            # Blocks before the first wanted line were not read.
            begin = chunk.first if last or lines.since_ms else min(chunk.first, lines.first)
            cursors.begin_at(chunk.run, begin)
            for part in cursors.take(chunk):
                if isinstance(part, Chunk):
                    for document in line_documents(part, lines):
                        yield document
                else:
                    yield gap_document(part)
        remark = missing_end(row, *attempt)
        if remark is not None:
            for run in [run for run in cursors.following if not cursors.ended(run)]:
                yield mark_document(run.run, remark)
            if remark == LOST and not cursors.following and lines.run is None:
                yield mark_document(None, LOST)


async def _stream(
    request: web.Request, documents: AsyncIterator[dict[str, Any]], *, as_text: bool
) -> web.StreamResponse:
    """Answers with documents, some at a time."""
    # Before the answer begins, so that an error has a status of its own.
    document = await anext(documents, None)
    response = web.StreamResponse()
    response.content_type = "text/plain" if as_text else "application/x-ndjson"
    response.charset = "utf-8"
    await response.prepare(request)
    buffer = bytearray()
    while document is not None:
        buffer += text_of(document).encode() if as_text else orjson.dumps(document)
        buffer += b"\n"
        if len(buffer) > _WRITE_BYTES:
            await response.write(bytes(buffer))
            buffer.clear()
        document = await anext(documents, None)
    await response.write(bytes(buffer))
    await response.write_eof()
    return response


def _filter_of(request: web.Request) -> LineFilter:
    level = choice_parameter(request, "level", "", ("", *LEVELS))
    since = moment_parameter(request, "since")
    return LineFilter(
        first=integer_parameter(request, "from", 0, low=0, high=2**53),
        level=LEVELS.get(level, 0),
        text=text_parameter(request, "q"),
        run=text_parameter(request, "run", longest=40),
        since_ms=max(0, (since - _EPOCH) // timedelta(milliseconds=1)) if since is not None else 0,
    )


def _number(request: web.Request, name: str) -> int:
    text = request.match_info[name]
    if len(text) > 10 or int(text) > 2**31 - 2:
        raise NotFound(f"there is no {name} {text[:20]}")
    return int(text)
