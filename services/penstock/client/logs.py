"""Task logs, as a part of `Client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any, Protocol

import orjson

from penstock.client.arguments import encode_moment
from penstock.client.transport import Document, Query, Transport, query_of

# Seconds between two streams of one log.
RECONNECT_S = 0.5


class LineTransport(Transport, Protocol):
    """Also reads an answer line by line; `Client` implements it."""

    def _lines(
        self, path: str, query: Query = (), headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]: ...


class LogMethods:
    """Methods about task logs."""

    async def log_runs(self: Transport, task_id: int) -> list[Document]:
        """The runs of a task that have logged anything, in the order of attempts.

        Each has `step`, `attempt`, `run`, `worker`, `state`, `lines` and further totals.

        Raises:
            NotFound: there is no such task, or its log was deleted.
        """
        answer = await self._request("GET", f"/tasks/{task_id}/logs")
        runs: list[Document] = answer["runs"]
        return runs

    async def log_lines(
        self: LineTransport,
        task_id: int,
        step: int,
        attempt: int,
        *,
        first: int | None = None,
        limit: int | None = None,
        tail: int | None = None,
        level: str | None = None,
        text: str | None = None,
        since: datetime | None = None,
    ) -> AsyncIterator[Document]:
        """The lines of one attempt that there are now: `line`, `at`, `level`, `source`, `text`.

        Args:
            task_id: of the task.
            step: position in its sequence of stages.
            attempt: of this step, from 0.
            first: number of the first line.
            limit: most lines.
            tail: only the last ones; not together with `first` or `limit`.
            level: the lowest one, such as WARNING.
            text: part of a line's text.
            since: only lines of this moment or later; without an offset it is local time.

        Raises:
            NotFound: there is no such attempt, or the log was deleted.
        """
        query = [
            *query_of(limit=limit, tail=tail, level=level, q=text),
            *query_of(**{"from": first}),
            *_since(since),
        ]
        async for line in self._lines(f"/tasks/{task_id}/logs/{step}/{attempt}", query):
            yield orjson.loads(line)

    async def follow_log(
        self: LineTransport,
        task_id: int,
        step: int,
        attempt: int,
        *,
        tail: int | None = None,
        level: str | None = None,
        text: str | None = None,
        since: datetime | None = None,
    ) -> AsyncIterator[Document]:
        """The lines of one attempt until it has ended, as they are logged.

        The last document is the end: `state`, `outcome`, `stage` and `message`, without a `text`.

        Args:
            task_id: of the task.
            step: position in its sequence of stages.
            attempt: of this step, from 0.
            tail: of the lines that are there already, only the last ones.
            level: the lowest one, such as WARNING.
            text: part of a line's text.
            since: only lines of this moment or later; without an offset it is local time.

        Raises:
            NotFound: there is no such attempt, or the log was deleted.
        """
        path = f"/tasks/{task_id}/logs/{step}/{attempt}"
        last = ""
        while True:
            query: list[tuple[str, Any]] = [
                ("follow", "true"),
                *query_of(level=level, q=text, tail=None if last else tail),
                *_since(since),
            ]
            name = ""
            headers = {"Last-Event-ID": last} if last else {}
            async for line in self._lines(path, query, headers):
                field, _, value = line.partition(b": ")
                if field == b"event":
                    name = value.decode()
                elif field == b"id":
                    last = value.decode()
                elif field == b"data" and name in ("line", "end"):
                    yield orjson.loads(value)
                    if name == "end":
                        return
            # The gateway stopped, or this client fell behind: another stream continues. Each begins
            # with a read of the stored lines, so a gateway that is stopping is not asked at once.
            await asyncio.sleep(RECONNECT_S)


def _since(moment: datetime | None) -> list[tuple[str, str]]:
    return query_of(since=encode_moment(moment, "since"))
