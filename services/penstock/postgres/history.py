"""History: moving what has ended, and the notes about its partitions.

What changes anything goes through the session that holds the lock (`own`): when that is gone, so is the right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.core.history import Part, span_of
from penstock.errors import PostgresUnavailable
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.session import Session

_MOMENTS = ("started_at", "finished_at", "due_at", "created_at")
# Of partitions to retire: all that are there.
_ALL = 100_000


class Place(NamedTuple):
    """Behind which task to look on, in the order in which they ended."""

    finished_at: datetime = datetime.min.replace(tzinfo=UTC)
    id: int = 0


@contextmanager
def _patiently() -> Iterator[None]:
    """Lets what stands in the way of history be tried again, like anything else that passes: nothing else depends on it."""
    try:
        yield
    except asyncpg.LockNotAvailableError as error:
        raise PostgresUnavailable(f"PostgreSQL: history is locked: {error}") from error
    except asyncpg.CheckViolationError as error:
        raise PostgresUnavailable(
            f"PostgreSQL: {error}: was a partition dropped by hand? Then set dropped_at of its day in penstock.history_part"
        ) from error


async def own(session: Session) -> datetime | None:
    """Takes the right to move and retire, for as long as the session lives; the time, or None if another has it.

    Raises:
        SessionLost, PostgresUnavailable: it is not known.
    """
    [row] = await session.fetch("history.own")
    return row["now"] if row["owned"] else None


async def look(session: Session, behind: Place, before: datetime, limit: int) -> list[Place]:
    """The next tasks that ended before a moment, in the order in which they ended.

    Raises:
        SessionLost, PostgresUnavailable: it is not known.
    """
    rows = await session.fetch("history.look", behind.finished_at, behind.id, before, limit)
    return [Place(row["finished_at"], row["id"]) for row in rows]


async def open_days(session: Session, days: Iterable[date]) -> int:
    """Makes partitions for those of some days that have none; returns how many it made.

    Raises:
        SessionLost, PostgresUnavailable: none was made.
    """
    with _patiently():
        return int(await session.fetchval("history.open", sorted(days)))


async def move(session: Session, ids: Sequence[int], before: datetime) -> tuple[int, list[date]]:
    """Moves those of some tasks that ended before a moment and owe nothing, all in one statement.

    Those whose day has no partition, or a sealed one, stay.

    Returns:
        How many it moved, and the days without a partition.

    Raises:
        SessionLost, PostgresUnavailable: all were moved, or none.
    """
    with _patiently():
        [row] = await session.fetch("history.move", list(ids), before)
    return row["moved"], row["missing"]


async def parts(executor: Any, *, dropped: bool = False, limit: int = _ALL) -> list[asyncpg.Record]:
    """The notes about partitions, the latest day first.

    Args:
        executor: a pool or a connection.
        dropped: also of those that are gone.
        limit: of how many.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(query("history.parts"), dropped, limit)
    return rows


def part_of(row: Mapping[str, Any] | asyncpg.Record) -> Part:
    """A note as decisions take it."""
    return Part(
        row["day"],
        row["part"],
        row["tasks"],
        sealed=row["sealed_at"] is not None,
        archived=row["archived_at"] is not None,
    )


async def seal(session: Session, part: Part) -> None:
    """From now on nothing is moved into it.

    Raises:
        SessionLost, PostgresUnavailable: perhaps it is sealed.
    """
    await session.fetch("history.seal", part.day, part.number)


async def page(session: Session, day: date, behind: int, limit: int) -> list[asyncpg.Record]:
    """Tasks of a day behind an id, in the order of their ids.

    By short statements: a long one would keep dead rows of all tables from being cleared away.

    Raises:
        SessionLost, PostgresUnavailable: it is not known.
    """
    return await session.fetch("history.page", *span_of(day), behind, limit)


async def count(session: Session, day: date) -> int:
    """How many tasks of a day are in history.

    Raises:
        SessionLost, PostgresUnavailable: it is not known.
    """
    return int(await session.fetchval("history.count", *span_of(day)))


async def archived(session: Session, part: Part, tasks: int, size: int, sha256: str) -> bool:
    """Notes that the object of a sealed part is there and whole; False if there is no such part.

    Raises:
        SessionLost, PostgresUnavailable: perhaps it is noted.
    """
    rows = await session.fetch(
        "history.archived", part.day, part.number, part.object_key, tasks, size, sha256
    )
    return bool(rows)


async def drop(session: Session, part: Part, *, archived: bool) -> bool:
    """Drops a sealed part and notes it, both or neither.

    False if that cannot be now: somebody reads history, or it is not archived and has to be, or it is not there.

    Raises:
        SessionLost, PostgresUnavailable: perhaps it is dropped.
    """
    try:
        return bool(await session.fetchval("history.drop", part.day, part.number, archived))
    except asyncpg.LockNotAvailableError:
        return False


async def movable(executor: Any, before: datetime, most: int) -> tuple[int, datetime | None, datetime | None]:
    """How many tasks ended before a moment, `most` at most, and when the first and the last of those did.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        row = await executor.fetchrow(query("history.movable"), before, most)
    return row["tasks"], row["first"], row["last"]


async def now(executor: Any) -> datetime:
    """The time by the clock that the rows go by.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        found: datetime = await executor.fetchval(query("history.now"))
    return found


def as_task(row: Mapping[str, Any] | asyncpg.Record) -> dict[str, Any]:
    """A row of history in the shape of `penstock.postgres.tasks.get`."""
    return {
        **row,
        # What only tasks under way have.
        "pausing": False,
        "due_at": None,
        "attempts": [_timed(one) for one in orjson.loads(row["attempts"])],
        "callbacks_owed": [_timed(one) for one in orjson.loads(row["callbacks_owed"])],
    }


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    moments = {name: datetime.fromisoformat(row[name]) for name in _MOMENTS if row.get(name)}
    return row | moments
