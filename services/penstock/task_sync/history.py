"""History: moves finished tasks and flows out of the hot tables, and retires expired days.

Guarantees
- A task is in the hot tables or in history, complete and once: it moves with its attempts and
  callbacks in one statement.
- A task with a pending or held callback is not moved.
- A flow is in the hot tables or in history with its nodes and those of earlier generations. The
  root of a family moves first, then its child flows and tasks: until then it can be recovered.
- With archival on, a day is dropped only after its objects were read back and verified: they have
  as many lines as the partition has tasks and flows, and the bytes that were written. Each step is
  recorded before the next begins and can be repeated, so the process that takes over after a crash
  continues from the record.
- One process runs at a time: the session through which all statements go holds the lock.
- Other work has precedence. History skips locked rows, does not wait for the disk, and holds a
  snapshot for one page at most. It rests at least as long as it works, and handles at most
  `history_rate` tasks a second.

When in doubt, nothing is dropped or moved: while PostgreSQL or the object store is unavailable, or
an object is damaged, history tries again after `history_every_s`. The process does not end, because
releases do not depend on history.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, timedelta
from typing import Any, TypeAlias

import asyncpg

from penstock.core.history import Part, Policy, Step, next_step, rest_s
from penstock.errors import Conflict, CorruptObject, ObjectsUnavailable, PostgresUnavailable, SessionLost
from penstock.objects import ObjectStore, archive
from penstock.objects.archive import ArchiveObject
from penstock.postgres import documents, flow_history, history
from penstock.postgres.history import EndPosition
from penstock.postgres.session import Session, open_session
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Tasks that one statement moves, and tasks that one statement reads for the archive.
BATCH = 500
PAGE = 200
# Flows that one statement moves: each has up to a thousand nodes.
FLOW_BATCH = 50
# Events of flows that one statement deletes.
EVENTS = 5_000
# Batches of one round; the next round retires days before it moves further tasks.
BATCHES = 1_000
# A dry run counts movable tasks up to this number.
COUNTED = 1_000_000

_ReadPage: TypeAlias = Callable[[Session, date, int, int], Awaitable[list[asyncpg.Record]]]
_Encode: TypeAlias = Callable[[Sequence[asyncpg.Record]], list[bytes]]


class History:
    """Moves finished tasks and flows, and retires days.

    Args:
        settings: of the service.
        objects: the object store of the archive.

    Attributes:
        moved: tasks moved by this instance.
        moved_flows: flows moved by this instance.
        archived: tasks in verified objects.
        archived_bytes: size of these objects.
        dropped: dropped partitions.
    """

    def __init__(self, settings: TaskSyncSettings, objects: ObjectStore) -> None:
        self._settings = settings
        self._objects = objects
        self._policy = policy_of(settings)
        self._behind = EndPosition()
        self._flow_behind = EndPosition()
        self.moved = 0
        self.moved_flows = 0
        self.archived = 0
        self.archived_bytes = 0
        self.dropped = 0

    async def run(self) -> None:
        """Runs rounds until cancelled; the first one starts after `history_every_s`."""
        more = False
        while True:
            if not more:
                await asyncio.sleep(self._settings.history_every_s)
            more = False
            try:
                # A conflict means that another process holds the lock.
                with suppress(Conflict):
                    more = await self.round()
            except (PostgresUnavailable, SessionLost) as error:
                log.warning("History is delayed", extra={"event": "history_delayed", "error": error})

    async def round(self) -> bool:
        """Retires expired days and moves finished flows and tasks; returns whether more can move.

        Raises:
            Conflict: another process holds the lock.
            PostgresUnavailable, SessionLost: the round is incomplete; its finished steps stay.
        """
        # Not durable: a later round repeats a move that a crash of the server undoes.
        async with open_session(self._settings.sessions, "history", durable=False) as session:
            now = await history.lock(session)
            if now is None:
                raise Conflict(
                    "another process is moving and retiring history now: try again when it has ended"
                )
            await self._retire(session, now)
            await self._delete_events(session)
            more_flows = await self._move_flows(session, now)
            return await self._move(session, now) or more_flows

    async def _delete_events(self, session: Session) -> None:
        for _ in range(BATCHES):
            began_s = _now_s()
            deleted = await flow_history.delete_events(session, EVENTS)
            if deleted < EVENTS:
                return
            await asyncio.sleep(rest_s(0, _now_s() - began_s, self._settings.history_rate))

    async def _move_flows(self, session: Session, now: datetime) -> bool:
        before = self._policy.ended_before(now)
        moved_before = self.moved_flows
        for _ in range(BATCHES):
            began_s = _now_s()
            ended = await flow_history.next_ended(session, self._flow_behind, before, FLOW_BATCH)
            if ended:
                ids = [position.id for position in ended]
                moved, missing = await flow_history.move(session, ids, before)
                self.moved_flows += moved
                if missing:
                    await history.create_partitions(session, missing)
                    self.moved_flows += (await flow_history.move(session, ids, before))[0]
            if len(ended) < FLOW_BATCH:
                self._flow_behind = EndPosition()
                # Child flows ended before their root: the search has passed them when that moves.
                return self.moved_flows > moved_before
            self._flow_behind = ended[-1]
            await asyncio.sleep(rest_s(len(ended), _now_s() - began_s, self._settings.history_rate))
        return True

    async def _move(self, session: Session, now: datetime) -> bool:
        before = self._policy.ended_before(now)
        for _ in range(BATCHES):
            began_s = _now_s()
            ended = await history.next_ended(session, self._behind, before, BATCH)
            if ended:
                await self._move_batch(session, [position.id for position in ended], before)
            if len(ended) < BATCH:
                # The next round starts again at the oldest task, for those that could not be moved.
                self._behind = EndPosition()
                return False
            self._behind = ended[-1]
            await asyncio.sleep(rest_s(len(ended), _now_s() - began_s, self._settings.history_rate))
        return True

    async def _move_batch(self, session: Session, ids: Sequence[int], before: datetime) -> None:
        moved, missing = await history.move(session, ids, before)
        self.moved += moved
        if missing:
            # `missing` has only days of movable tasks. A task with an open callback would otherwise
            # create the partition of its dropped day again in each round.
            await history.create_partitions(session, missing)
            self.moved += (await history.move(session, ids, before))[0]

    async def _retire(self, session: Session, now: datetime) -> None:
        async with session.connection() as connection:
            parts = await history.parts(connection)
        for row in reversed(parts):
            try:
                part = history.part_of(row)
                sizes = {part.object_key: row["bytes"]}
                if row["flow_bytes"] is not None:
                    sizes[part.flows_key] = row["flow_bytes"]
                await self._retire_part(session, part, sizes, now)
            except ObjectsUnavailable as error:
                log.warning(
                    "A day of history is kept because the object store is unavailable",
                    extra={"event": "history_retirement_delayed", "day": row["day"], "error": error},
                )
                return
            except CorruptObject as error:
                log.error(  # noqa: TRY400 (the error is a field)
                    "A day of history is kept because its archive is damaged",
                    extra={"event": "history_archive_damaged", "day": row["day"], "error": error},
                )

    async def _retire_part(
        self, session: Session, part: Part, sizes: Mapping[str, int | None], now: datetime
    ) -> None:
        while step := next_step(part, self._policy, now):
            if step is Step.SEAL:
                await history.seal(session, part)
                part = dataclasses.replace(part, sealed=True)
            elif step is Step.ARCHIVE:
                sizes = await self._archive(session, part)
                part = dataclasses.replace(part, archived=True)
            elif self._policy.archive and not await self._are_stored(sizes):
                log.warning(
                    "An archived object has changed; archiving the day again",
                    extra={"event": "history_object_changed", "day": part.day, "object": part.object_key},
                )
                part = dataclasses.replace(part, archived=False)
            else:
                if await history.drop(session, part, archived=self._policy.archive):
                    self.dropped += 1
                    log.info(
                        "A day of history was dropped",
                        extra={"event": "history_dropped", "day": part.day, "tasks": part.tasks},
                    )
                else:
                    log.info(
                        "A day of history is not dropped yet because a query reads history",
                        extra={"event": "history_drop_delayed", "day": part.day},
                    )
                return

    async def _are_stored(self, sizes: Mapping[str, int | None]) -> bool:
        for object_key, size in sizes.items():
            if await self._objects.size_of(object_key) != size:
                return False
        return True

    async def _archive(self, session: Session, part: Part) -> dict[str, int | None]:
        """Archives the tasks and the flows of a part; returns the sizes of its objects."""
        tasks = await history.count(session, part.day)
        stored = await self._archive_rows(
            part.object_key, self._pages(session, part, history.page, _lines), tasks
        )
        sizes: dict[str, int | None] = {part.object_key: stored.size}
        flows = await flow_history.count(session, part.day)
        flow_object: tuple[int, int, str] | None = None
        if flows:
            found = await self._archive_rows(
                part.flows_key, self._pages(session, part, flow_history.page, _flow_lines), flows
            )
            sizes[part.flows_key] = found.size
            flow_object = found.lines, found.size, found.sha256
        if not await history.record_archived(
            session, part, stored.lines, stored.size, stored.sha256, flow_object
        ):
            raise CorruptObject(f"the partition of object {part.object_key} is missing or not sealed")
        self.archived += stored.lines
        self.archived_bytes += sum(size or 0 for size in sizes.values())
        log.info(
            "A day of history was archived",
            extra={
                "event": "history_archived",
                "day": part.day,
                "tasks": tasks,
                "flows": flows,
                "bytes": stored.size,
                "object": part.object_key,
            },
        )
        return sizes

    async def _archive_rows(
        self, object_key: str, pages: AsyncIterator[Sequence[bytes]], rows: int
    ) -> ArchiveObject:
        """Writes an object of so many rows and verifies it.

        Raises:
            CorruptObject: it is not what was written.
        """
        written = await archive.write(self._objects, object_key, pages)
        stored = await archive.read_back(self._objects, object_key)
        if stored != written:
            raise CorruptObject(f"object {object_key} is {stored}, but {written} was written")
        if stored.lines != rows:
            raise CorruptObject(
                f"object {object_key} has {stored.lines:,} lines, but its partition has {rows:,} rows"
            )
        return stored

    async def _pages(
        self, session: Session, part: Part, page: _ReadPage, lines: _Encode
    ) -> AsyncIterator[Sequence[bytes]]:
        behind = 0
        while True:
            began_s = _now_s()
            rows = await page(session, part.day, behind, PAGE)
            if not rows:
                return
            # In a thread: encoding a page would delay releases on the event loop.
            yield await asyncio.to_thread(lines, rows)
            behind = rows[-1]["id"]
            await asyncio.sleep(rest_s(len(rows), _now_s() - began_s, self._settings.history_rate))


async def dry_run(settings: TaskSyncSettings, executor: Any) -> dict[str, Any]:
    """The effects that a round would have, as a document: tasks to move, days to retire.

    Args:
        settings: of the service.
        executor: a pool or a connection.

    Raises:
        PostgresUnavailable: no server.
    """
    policy = policy_of(settings)
    now = await history.now(executor)
    tasks, first, last = await history.movable(executor, policy.ended_before(now), COUNTED)
    parts = [history.part_of(row) for row in reversed(await history.parts(executor))]
    expired = [part for part in parts if policy.is_expired(part.day, now)]
    return {
        "ended": tasks,
        "more": tasks == COUNTED,
        "first": first,
        "last": last,
        "retired": [
            {"day": part.day, "part": part.number, "tasks": part.tasks, "object": part.object_key}
            if policy.archive
            else {"day": part.day, "part": part.number, "tasks": part.tasks, "object": None}
            for part in expired
        ],
    }


def policy_of(settings: TaskSyncSettings) -> Policy:
    """The retention policy of the settings."""
    retain = timedelta(days=settings.history_retain_days) if settings.history_retain_days else None
    return Policy(timedelta(days=settings.history_keep_days), retain, settings.history_archive)


def _lines(rows: Sequence[asyncpg.Record]) -> list[bytes]:
    return [documents.archived(history.as_task(row)) for row in rows]


def _flow_lines(rows: Sequence[asyncpg.Record]) -> list[bytes]:
    return [documents.archived_flow(flow_history.as_flow(row)) for row in rows]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
