"""History: moves finished tasks out of the hot tables and retires expired days of history.

Guarantees
- A task is in the hot tables or in history, complete and once: it moves with its attempts and
  callbacks in one statement.
- A task with a pending or held callback is not moved.
- With archival on, a day is dropped only after its object was read back and verified: it has as
  many lines as the partition has tasks, and the bytes that were written. Each step is recorded
  before the next begins and can be repeated, so the process that takes over after a crash continues
  from the record.
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
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from penstock.core.history import Part, Policy, Step, next_step, rest_s
from penstock.errors import Conflict, CorruptObject, ObjectsUnavailable, PostgresUnavailable, SessionLost
from penstock.objects import ObjectStore, archive
from penstock.postgres import documents, history
from penstock.postgres.history import EndPosition
from penstock.postgres.session import Session, open_session
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Tasks that one statement moves, and tasks that one statement reads for the archive.
BATCH = 500
PAGE = 200
# Batches of one round; the next round retires days before it moves further tasks.
BATCHES = 1_000
# A dry run counts movable tasks up to this number.
COUNTED = 1_000_000


class History:
    """Moves finished tasks and retires days.

    Args:
        settings: of the service.
        objects: the object store of the archive.

    Attributes:
        moved: tasks moved by this instance.
        archived: tasks in verified objects.
        archived_bytes: size of these objects.
        dropped: dropped partitions.
    """

    def __init__(self, settings: TaskSyncSettings, objects: ObjectStore) -> None:
        self._settings = settings
        self._objects = objects
        self._policy = policy_of(settings)
        self._behind = EndPosition()
        self.moved = 0
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
        """Retires expired days and moves finished tasks; returns whether more tasks can be moved.

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
            return await self._move(session, now)

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
                await self._retire_part(session, history.part_of(row), row["bytes"], now)
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

    async def _retire_part(self, session: Session, part: Part, size: int | None, now: datetime) -> None:
        while step := next_step(part, self._policy, now):
            if step is Step.SEAL:
                await history.seal(session, part)
                part = dataclasses.replace(part, sealed=True)
            elif step is Step.ARCHIVE:
                size = await self._archive(session, part)
                part = dataclasses.replace(part, archived=True)
            elif self._policy.archive and await self._objects.size_of(part.object_key) != size:
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

    async def _archive(self, session: Session, part: Part) -> int:
        object_key = part.object_key
        written = await archive.write(self._objects, object_key, self._pages(session, part))
        stored = await archive.read_back(self._objects, object_key)
        if stored != written:
            raise CorruptObject(f"object {object_key} is {stored}, but {written} was written")
        tasks = await history.count(session, part.day)
        if stored.lines != tasks:
            raise CorruptObject(
                f"object {object_key} has {stored.lines:,} tasks, but its partition has {tasks:,}"
            )
        if not await history.record_archived(session, part, stored.lines, stored.size, stored.sha256):
            raise CorruptObject(f"the partition of object {object_key} is missing or not sealed")
        self.archived += stored.lines
        self.archived_bytes += stored.size
        log.info(
            "A day of history was archived",
            extra={
                "event": "history_archived",
                "day": part.day,
                "tasks": tasks,
                "bytes": stored.size,
                "object": object_key,
            },
        )
        return stored.size

    async def _pages(self, session: Session, part: Part) -> AsyncIterator[Sequence[bytes]]:
        behind = 0
        while True:
            began_s = _now_s()
            rows = await history.page(session, part.day, behind, PAGE)
            if not rows:
                return
            # In a thread: encoding a page would delay releases on the event loop.
            yield await asyncio.to_thread(_lines, rows)
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


def _now_s() -> float:
    return asyncio.get_running_loop().time()
