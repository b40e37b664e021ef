"""History: moves what has ended out of the hot tables, in batches, and retires days of history that are old enough.

Guarantees
- A task is in the hot tables or in history, whole and once: it moves with its attempts and callbacks in one statement.
- What somebody still waits for stays: a task with a callback that is pending or held is not moved.
- With archival on, a day is dropped only after its object was read back and found whole: as many lines as the partition has
  tasks, and the bytes that were written. Each step is noted before the next begins and harmless when it is done again, so
  whoever takes over after a crash goes on from the notes.
- One process does it at a time: the lock lives in the session through which everything goes.
- It gives way: it waits for no row that another holds, commits without waiting for the disk, rests at least as long as it
  works, does at most `history_rate` tasks a second, and holds no snapshot for longer than a page.

In doubt it keeps: while PostgreSQL or the object store does not answer, or an object is not as it should be, nothing is
dropped, what cannot be moved stays where it is, and it is tried again after `history_every_s`. The process goes on meanwhile:
nothing that is released depends on it.
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
from penstock.postgres.history import Place
from penstock.postgres.session import Session, open_session
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Tasks moved by one statement, and read at a time to be archived.
BATCH = 500
PAGE = 200
# Batches after which it is looked for what is to be retired, however much there is to move.
BATCHES = 1_000
# Of what could be moved, a rehearsal counts so many.
COUNTED = 1_000_000


class History:
    """Moves and retires.

    Args:
        settings: of the service.
        objects: where days are archived.

    Attributes:
        moved: tasks, since it was made.
        archived: tasks in objects that were found whole.
        archived_bytes: of these objects.
        dropped: partitions.
    """

    def __init__(self, settings: TaskSyncSettings, objects: ObjectStore) -> None:
        self._settings = settings
        self._objects = objects
        self._policy = policy_of(settings)
        self._behind = Place()
        self.moved = 0
        self.archived = 0
        self.archived_bytes = 0
        self.dropped = 0

    async def run(self) -> None:
        """Goes on until cancelled; not at once, since whoever has just started has more urgent things to do."""
        more = False
        while True:
            if not more:
                await asyncio.sleep(self._settings.history_every_s)
            more = False
            try:
                # Another process may be at it.
                with suppress(Conflict):
                    more = await self.round()
            except (PostgresUnavailable, SessionLost) as error:
                log.warning("history waits: %s", error)

    async def round(self) -> bool:
        """Retires what is over and moves what has ended; returns whether there is more to move.

        Raises:
            Conflict: another process is at it.
            PostgresUnavailable, SessionLost: what was done by then stays so.
        """
        # A move that a crash of the server undoes is made again.
        async with open_session(self._settings.sessions, "history", durable=False) as session:
            now = await history.own(session)
            if now is None:
                raise Conflict("another process is moving and retiring history just now")
            await self._retire(session, now)
            return await self._move(session, now)

    async def _move(self, session: Session, now: datetime) -> bool:
        before = self._policy.ended_before(now)
        for _ in range(BATCHES):
            began_s = _now_s()
            found = await history.look(session, self._behind, before, BATCH)
            if found:
                await self._move_some(session, [place.id for place in found], before)
            if len(found) < BATCH:
                # What was left behind is looked at again in the next round.
                self._behind = Place()
                return False
            self._behind = found[-1]
            await asyncio.sleep(rest_s(len(found), _now_s() - began_s, self._settings.history_rate))
        return True

    async def _move_some(self, session: Session, ids: Sequence[int], before: datetime) -> None:
        moved, missing = await history.move(session, ids, before)
        self.moved += moved
        if missing:
            # Asked of those only that can be moved: else who waits for a target would begin its day again in every round.
            await history.open_days(session, missing)
            self.moved += (await history.move(session, ids, before))[0]

    async def _retire(self, session: Session, now: datetime) -> None:
        for row in reversed(await history.parts(session.connection)):
            try:
                await self._retire_part(session, history.part_of(row), row["bytes"], now)
            except ObjectsUnavailable as error:
                log.warning("history of %s is kept: %s", row["day"], error)
                return
            except CorruptObject as error:
                log.error("history of %s is kept: %s", row["day"], error)  # noqa: TRY400 (the message says it all)

    async def _retire_part(self, session: Session, part: Part, size: int | None, now: datetime) -> None:
        while step := next_step(part, self._policy, now):
            if step is Step.SEAL:
                await history.seal(session, part)
                part = dataclasses.replace(part, sealed=True)
            elif step is Step.ARCHIVE:
                size = await self._archive(session, part)
                part = dataclasses.replace(part, archived=True)
            elif self._policy.archive and await self._objects.size_of(part.object_key) != size:
                # Somebody has meddled with what was found whole in an earlier round.
                log.warning("%s is not as it was archived: once more", part.object_key)
                part = dataclasses.replace(part, archived=False)
            else:
                if await history.drop(session, part, archived=self._policy.archive):
                    self.dropped += 1
                    log.info("history of %s is dropped: %d tasks", part.day, part.tasks)
                else:
                    log.info("history of %s is not dropped yet: somebody reads history", part.day)
                return

    async def _archive(self, session: Session, part: Part) -> int:
        key = part.object_key
        written = await archive.write(self._objects, key, self._pages(session, part))
        found = await archive.read_back(self._objects, key)
        if found != written:
            raise CorruptObject(f"object {key} is {found}, and {written} was written")
        tasks = await history.count(session, part.day)
        if found.lines != tasks:
            raise CorruptObject(f"object {key} has {found.lines:,} tasks, and its partition {tasks:,}")
        if not await history.archived(session, part, found.lines, found.size, found.sha256):
            raise CorruptObject(f"object {key} is of a partition that is not there, or not sealed")
        self.archived += found.lines
        self.archived_bytes += found.size
        log.info("history of %s is archived: %d tasks, %d bytes in %s", part.day, tasks, found.size, key)
        return found.size

    async def _pages(self, session: Session, part: Part) -> AsyncIterator[Sequence[bytes]]:
        behind = 0
        while True:
            began_s = _now_s()
            rows = await history.page(session, part.day, behind, PAGE)
            if not rows:
                return
            # In a thread, so that releases go on beside it.
            yield await asyncio.to_thread(_lines, rows)
            behind = rows[-1]["id"]
            await asyncio.sleep(rest_s(len(rows), _now_s() - began_s, self._settings.history_rate))


async def rehearse(settings: TaskSyncSettings, executor: Any) -> dict[str, Any]:
    """What a round would do now, as a document: how many tasks would move, and the days that would be retired.

    Raises:
        PostgresUnavailable: no server.
    """
    policy = policy_of(settings)
    now = await history.now(executor)
    tasks, first, last = await history.movable(executor, policy.ended_before(now), COUNTED)
    parts = [history.part_of(row) for row in reversed(await history.parts(executor))]
    over = [part for part in parts if policy.is_over(part.day, now)]
    return {
        "ended": tasks,
        "more": tasks == COUNTED,
        "first": first,
        "last": last,
        "retired": [
            {"day": part.day, "part": part.number, "tasks": part.tasks, "object": part.object_key}
            if policy.archive
            else {"day": part.day, "part": part.number, "tasks": part.tasks, "object": None}
            for part in over
        ],
    }


def policy_of(settings: TaskSyncSettings) -> Policy:
    """What the settings say of history."""
    retain = timedelta(days=settings.history_retain_days) if settings.history_retain_days else None
    return Policy(timedelta(days=settings.history_keep_days), retain, settings.history_archive)


def _lines(rows: Sequence[asyncpg.Record]) -> list[bytes]:
    return [documents.archived(history.as_task(row)) for row in rows]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
