"""Follows the log of one attempt by server-sent events, from segments to the end of the topic.

An event `line` has the id RUN:LINE, with which a client resumes. The event `end` comes last; a
client that got `behind` instead reconnects.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import asyncpg
import orjson
from aiohttp import web

from penstock.core.log_chunk import Chunk, RunCursors, RunId
from penstock.core.log_view import LOST, UNFINISHED, LastLines, LineFilter, gap_document, line_documents
from penstock.gateway.log_attempts import LAST_LINES_S, state_of
from penstock.gateway.log_source import Attempt, LogSource, is_wanted
from penstock.gateway.log_tail import FellBehind, TailReader
from penstock.postgres import tasks

# Seconds between two looks at the state of the attempt.
LOOK_S = 1.0
KEEP_ALIVE_S = 15.0
WAIT_S = 0.5
# Events that are written together.
_EVENTS = 500


class Follower:
    """One stream.

    Args:
        source: reads logs.
        pool: the database.
        request: of the client.
        row: of the task.
        attempt: the one to follow.
        lines: those that the client wants.
    """

    def __init__(
        self,
        source: LogSource,
        pool: asyncpg.Pool[asyncpg.Record],
        request: web.Request,
        row: Mapping[str, Any],
        attempt: Attempt,
        lines: LineFilter,
    ) -> None:
        self._source = source
        self._pool = pool
        self._request = request
        self._row = row
        self._attempt = attempt
        self._lines = lines
        self._cursors = RunCursors(_resumed(request, row["id"], attempt))
        self._response = web.StreamResponse()
        # Whether lines before the first one that is read are there.
        self._skips = False
        self._looked_s = self._written_s = 0.0
        self._over_since_s: float | None = None

    async def run(self, last: int) -> web.StreamResponse:
        """Writes until the log has ended, the client is gone, or the gateway stops.

        Args:
            last: of the lines that are there already, only so many; 0 is all.
        """
        log = await self._source.find(self._row, self._attempt, self._lines.since_ms)
        async with self._source.tail.reading(self._row["id"], log.next_offset) as reader:
            end = await self._source.tail.end(reader.number)
            self._response.content_type = "text/event-stream"
            self._response.charset = "utf-8"
            await self._response.prepare(self._request)
            # A filter needs all lines: its matches are not in the indexes.
            needed = last if self._lines == LineFilter() else 0
            self._skips = bool(needed or self._lines.since_ms)
            events: deque[bytes] = deque()
            kept = LastLines[bytes](last, len)
            async for chunk in self._source.stored(self._row, self._attempt, log, last=needed):
                (kept if last else events).extend(self._events(chunk))
                if len(events) > _EVENTS:
                    await self._write(events)
            with suppress(FellBehind):
                while reader.offset < end and self._is_open:
                    (kept if last else events).extend(self._taken(reader))
                    await self._write(events)
                    await reader.wait(WAIT_S)
                await self._write(kept.taken())
                await self._write(events)
                if (ended := await self._follow(reader)) is not None:
                    return await self._close("end", ended)
            return await self._close("behind", {"message": "reconnect to read on"})

    async def _follow(self, reader: TailReader) -> dict[str, Any] | None:
        """Writes new lines; returns how the log has ended, or None when the gateway stops."""
        while self._is_open:
            await self._write(deque(self._taken(reader)))
            if await self._is_over():
                state = state_of(self._row, *self._attempt, ended=None)
                message = None
                if not self._all_ended and (self._cursors.following or state["state"] == "lost"):
                    message = LOST if state["state"] == "lost" else UNFINISHED
                return {**state, "message": message}
            if _now_s() - self._written_s >= KEEP_ALIVE_S:
                await self._write(deque([b": waiting\n\n"]))
            await reader.wait(WAIT_S)
        return None

    @property
    def _is_open(self) -> bool:
        transport = self._request.transport
        return transport is not None and not transport.is_closing() and not self._source.tail.closed.is_set()

    @property
    def _all_ended(self) -> bool:
        following = self._cursors.following
        return bool(following) and all(self._cursors.ended(run) for run in following)

    async def _is_over(self) -> bool:
        """Whether the attempt has ended, and its last lines have arrived or had the time to."""
        now_s = _now_s()
        # An attempt whose log has ended may have another run.
        if now_s - self._looked_s < (WAIT_S if self._all_ended else LOOK_S):
            return False
        self._looked_s = now_s
        self._row = await tasks.get(self._pool, self._row["id"])
        if state_of(self._row, *self._attempt, ended=None)["state"] in ("running", "waiting"):
            self._over_since_s = None
            return False
        if self._over_since_s is None:
            self._over_since_s = now_s
        # The worker ships the end of a log beside its result, so it may come a little later.
        patience_s = LAST_LINES_S if self._cursors.following else WAIT_S
        return self._all_ended or now_s - self._over_since_s >= patience_s

    def _taken(self, reader: TailReader) -> Iterator[bytes]:
        """The events of what was read; raises `FellBehind` when the reader fell behind."""
        for chunk in reader.take():
            if is_wanted(chunk, self._row["id"], self._attempt):
                yield from self._events(chunk)

    def _events(self, chunk: Chunk) -> list[bytes]:
        if not self._lines.wants_run(chunk.run.run):
            return []
        if self._skips:
            # Earlier segments were not read.
            self._cursors.begin_at(chunk.run, chunk.first)
        found = []
        for part in self._cursors.take(chunk):
            if isinstance(part, Chunk):
                for document in line_documents(part, self._lines):
                    place = f"id: {document['run']}:{document['line']}\n".encode()
                    found.append(place + _event("line", document))
            else:
                found.append(_event("line", gap_document(part)))
        return found

    async def _write(self, events: deque[bytes]) -> None:
        if events:
            await self._response.write(b"".join(events))
            events.clear()
            self._written_s = _now_s()

    async def _close(self, name: str, document: Mapping[str, Any]) -> web.StreamResponse:
        if self._request.transport is not None:
            await self._response.write(_event(name, document))
            await self._response.write_eof()
        return self._response


def _event(name: str, document: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(document, option=orjson.OPT_UTC_Z))


def _resumed(request: web.Request, task_id: int, attempt: Attempt) -> dict[RunId, int]:
    """Where a client continues, by the id of the last event that it has received."""
    run, _, line = request.headers.get("Last-Event-ID", "").rpartition(":")
    if not run or not (line.isascii() and line.isdigit() and len(line) < 16):
        return {}
    return {RunId(task_id, *attempt, run): int(line) + 1}


def _now_s() -> float:
    return asyncio.get_running_loop().time()
