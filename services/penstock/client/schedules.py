"""Methods of `Client` about schedules and backfills. The API's description has the documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import orjson

from penstock.client.arguments import encode_moment
from penstock.client.operations import MAX_POLL_S, local_user
from penstock.client.transport import Document, Transport, pages, query_of, without_none

PAGE_SIZE = 500


class BackfillMethods:
    """The methods of `Client` about backfills."""

    async def backfill(
        self: Transport,
        schedule: str,
        since: datetime,
        until: datetime | None = None,
        *,
        rate: float | None = None,
        max_running: int | None = None,
        rerun: bool = False,
        by: str | None = None,
        dry_run: bool = False,
        wait: bool = True,
        progress: Callable[[Document], None] | None = None,
    ) -> Document:
        """Runs the ticks of a past range, and waits until all flows have ended.

        The service `flows` carries the backfill on even when this client stops. `stop_backfill`
        stops it.

        Args:
            schedule: its name.
            since: the first moment of the range; a naive moment is local time.
            until: the last one; None is now.
            rate: most flows that start a second; None is no limit.
            max_running: most flows that run at the same time; None is no limit.
            rerun: run ticks again that have a flow; otherwise they are left.
            by: name of the operator for the audit; None is user@host.
            dry_run: count only, and start nothing.
            wait: False returns as soon as the backfill is stored.
            progress: called with the `Backfill` document again and again, first with the new one.

        Raises:
            NotFound: there is no such schedule.
            Invalid: the range is not in the past, or too long.
            GatewayUnavailable: the backfill may have begun. A second one leaves what the first one
                has run, unless both are to run ticks again.
        """
        wire = without_none(
            since=encode_moment(since, "since"),
            until=encode_moment(until, "until"),
            rate=rate,
            max_running=max_running,
            rerun=rerun or None,
            by=by or local_user(),
            dry_run=dry_run or None,
        )
        found = await self._request("POST", _path(schedule, "/backfill"), orjson.dumps(wire), safe=dry_run)
        pause_s = 0.05
        while not dry_run:
            if progress is not None:
                progress(found)
            if found["state"] != "running" or not wait:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_POLL_S, pause_s * 1.5)
            found = await self._request("GET", f"/backfills/{found['id']}")
        return found

    async def backfills(
        self: Transport, *, schedule: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """Backfills, the latest first.

        Args:
            schedule: only those of this schedule.
            limit: most backfills; None is all.
        """
        query = query_of(schedule=schedule)
        async for each in pages(self, "/backfills", "backfills", query, limit, PAGE_SIZE):
            yield each

    async def get_backfill(self: Transport, id: int) -> Document:  # noqa: A002 (the platform's word for it)
        """One backfill with its progress.

        Raises:
            NotFound: there is no such backfill.
        """
        return await self._request("GET", f"/backfills/{id}")

    async def stop_backfill(
        self: Transport,
        id: int,  # noqa: A002 (as above)
        *,
        cancel: bool = False,
        by: str | None = None,
    ) -> Document:
        """Stops a backfill, and returns it as it is now.

        Args:
            id: of the backfill.
            cancel: cancel its running flows, too; otherwise they go on.
            by: name of the operator for the audit; None is user@host.

        Raises:
            NotFound: there is no such backfill.
        """
        body = orjson.dumps({"by": by or local_user(), "cancel": cancel})
        return await self._request("POST", f"/backfills/{id}/stop", body)


class ScheduleMethods(BackfillMethods):
    """The methods of `Client` about schedules."""

    async def put_schedule(self: Transport, /, name: str, *, cron: str, **settings: Any) -> Document:
        """Creates a schedule or replaces its settings, and returns it as it is now.

        Args:
            name: letters, digits, `_` and `-`.
            cron: minute, hour, day, month, day of the week.
            settings: `flow`, the definition whose flows start, or `type`, the task type of which
                plain tasks start, with `stage`. Also `zone`, `version`, `input`, `priority`,
                `labels`, `events`, `callbacks`, `catch_up`, `catch_up_limit`, `catch_up_rate`,
                `overlap`, `paused`. Each other one gets its default, but `paused` stays.

        Raises:
            Invalid: a setting is refused; `pointer` is the field at fault.
        """
        body = orjson.dumps({"cron": cron, **settings})
        return await self._request("PUT", _path(name), body)

    async def schedules(
        self: Transport, *, flow: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """Schedules by name.

        Args:
            flow: only those of this definition.
            limit: most schedules; None is all.
        """
        async for each in pages(self, "/schedules", "schedules", query_of(flow=flow), limit, PAGE_SIZE):
            yield each

    async def schedule(self: Transport, name: str) -> Document:
        """One schedule.

        Raises:
            NotFound: there is no such schedule.
        """
        return await self._request("GET", _path(name))

    async def remove_schedule(self: Transport, name: str) -> bool:
        """Removes a schedule and stops its backfills; False if there was none. Its flows stay."""
        return bool((await self._request("DELETE", _path(name)))["removed"])

    async def pause_schedule(self: Transport, name: str) -> Document:
        """Pauses a schedule: no tick starts a flow. Running flows go on.

        Raises:
            NotFound: there is no such schedule.
        """
        return await self._request("POST", _path(name, "/pause"))

    async def resume_schedule(self: Transport, name: str) -> Document:
        """Resumes a schedule with its next tick from now.

        Raises:
            NotFound: there is no such schedule.
        """
        return await self._request("POST", _path(name, "/resume"))

    async def schedule_ticks(
        self: Transport, name: str, *, count: int = 10, after: datetime | None = None
    ) -> Sequence[Document]:
        """The next ticks of a schedule: `tick` in UTC and `local` in its zone.

        Args:
            name: of the schedule.
            count: 1 to 1,000.
            after: ticks after this moment; None is now, and a naive moment is local time.

        Raises:
            NotFound: there is no such schedule.
        """
        query = query_of(count=count, after=encode_moment(after, "after"))
        ticks: Sequence[Document] = (await self._request("GET", _path(name, "/ticks"), query=query))["ticks"]
        return ticks

    async def schedule_skips(
        self: Transport, name: str, *, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """Ticks of the last 30 days that started no flow, the latest first, with the reason.

        Args:
            name: of the schedule.
            limit: most records; None is all.

        Raises:
            NotFound: there is no such schedule.
        """
        async for each in pages(self, _path(name, "/skips"), "skips", [], limit, PAGE_SIZE):
            yield each

    async def schedule_history(
        self: Transport, name: str, *, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """The outcome of the past ticks: runs with their flows, and skips with the reason.

        The latest tick comes first. Skips go back 30 days, and runs as far as history does.

        Args:
            name: of the schedule.
            limit: most records; None is all.

        Raises:
            NotFound: there is no such schedule.
        """
        async for each in pages(self, _path(name, "/history"), "records", [], limit, PAGE_SIZE):
            yield each


def _path(name: str, part: str = "") -> str:
    return f"/schedules/{quote(name, safe='')}{part}"
