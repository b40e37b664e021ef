"""History: moves finished tasks, and records the state of its partitions.

Every write goes through the session that holds the lock, so a process that loses its session can
change nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.core.attempt import count_of
from penstock.core.history import Part, span_of
from penstock.errors import LockConflict, PostgresUnavailable
from penstock.postgres.queries import fetch, fetchval
from penstock.postgres.session import Session

_MOMENTS = ("queued_at", "started_at", "finished_at", "due_at", "created_at", "updated_at", "tick")
# More than all partitions.
_ALL = 100_000


class EndPosition(NamedTuple):
    """A position among finished tasks, directly behind one, in the order of their ends."""

    finished_at: datetime = datetime.min.replace(tzinfo=UTC)
    id: int = 0


@contextmanager
def retriable() -> Iterator[None]:
    """Translates errors of partitions to `PostgresUnavailable`, so that the round is retried."""
    try:
        yield
    except asyncpg.CheckViolationError as error:
        raise PostgresUnavailable(
            f"PostgreSQL: {error}: was a partition dropped by hand? Then set dropped_at of its day in penstock.history_part"
        ) from error


async def lock(session: Session) -> datetime | None:
    """Locks history for as long as the session lives.

    Returns:
        The server's time, or None when another session holds the lock.

    Raises:
        SessionLost, PostgresUnavailable: the lock may or may not be held.
    """
    [row] = await session.fetch("history.lock")
    return row["now"] if row["locked"] else None


async def next_ended(
    session: Session, behind: EndPosition, before: datetime, limit: int
) -> list[EndPosition]:
    """The next tasks that ended before a moment, in the order of their ends.

    Raises:
        SessionLost, PostgresUnavailable: nothing was read.
    """
    rows = await session.fetch(
        "history.next_ended", finished_at=behind.finished_at, id=behind.id, before=before, limit=limit
    )
    return [EndPosition(row["finished_at"], row["id"]) for row in rows]


async def create_partitions(session: Session, days: Iterable[date]) -> int:
    """Creates the missing partitions of days; returns how many it created.

    Raises:
        SessionLost, PostgresUnavailable: none was created.
    """
    with retriable():
        return int(await session.fetchval("history.create_partitions", sorted(days)))


async def move(session: Session, ids: Sequence[int], before: datetime) -> tuple[int, list[date]]:
    """Moves tasks that ended before a moment and have no open callback, in one statement.

    Tasks stay when their day has no partition, or a sealed one, and until their root flow has
    moved.

    Returns:
        How many it moved, and the days without a partition.

    Raises:
        SessionLost, PostgresUnavailable: all were moved, or none.
    """
    with retriable():
        [row] = await session.fetch("history.move", list(ids), before)
    return row["moved"], row["missing"]


async def parts(executor: Any, *, dropped: bool = False, limit: int = _ALL) -> list[asyncpg.Record]:
    """The recorded partitions, the latest day first.

    Args:
        executor: a pool or a connection.
        dropped: include partitions that were dropped.
        limit: most partitions.

    Raises:
        PostgresUnavailable: no server.
    """
    return await fetch(executor, "history.parts", dropped, limit)


def part_of(row: Mapping[str, Any] | asyncpg.Record) -> Part:
    """The `Part` of a row of `parts`."""
    return Part(
        row["day"],
        row["part"],
        row["tasks"],
        sealed=row["sealed_at"] is not None,
        archived=row["archived_at"] is not None,
        flows=row["flows"],
    )


async def seal(session: Session, part: Part) -> None:
    """Seals a part: no further task moves into it.

    Raises:
        SessionLost, PostgresUnavailable: it may or may not be sealed.
    """
    await session.fetch("history.seal", part.day, part.number)


async def page(session: Session, day: date, behind: int, limit: int) -> list[asyncpg.Record]:
    """Tasks of a day behind an id, ordered by id.

    Each page is a short statement: a long snapshot would keep dead rows of all tables from vacuum.

    Raises:
        SessionLost, PostgresUnavailable: nothing was read.
    """
    since, until = span_of(day)
    return await session.fetch("history.page", since=since, until=until, behind=behind, limit=limit)


async def count(session: Session, day: date) -> int:
    """How many tasks of a day are in history.

    Raises:
        SessionLost, PostgresUnavailable: nothing was read.
    """
    return int(await session.fetchval("history.count", *span_of(day)))


async def record_archived(
    session: Session,
    part: Part,
    tasks: int,
    size: int,
    sha256: str,
    flows: tuple[int, int, str] | None = None,
) -> bool:
    """Records the verified objects of a sealed part; False when there is no such part.

    Args:
        session: the one that holds the lock.
        part: the part.
        tasks: lines of the object of its tasks.
        size: its size in bytes.
        sha256: its digest in hexadecimal digits.
        flows: the same of the object of its flows; None without flows.

    Raises:
        SessionLost, PostgresUnavailable: it may or may not be recorded.
    """
    rows = await session.fetch(
        "history.record_archived",
        day=part.day,
        part=part.number,
        object=part.object_key,
        tasks=tasks,
        bytes=size,
        sha256=sha256,
        **dict(zip(("flows", "flow_bytes", "flow_sha256"), flows or (0, None, None), strict=True)),
    )
    return bool(rows)


async def drop(session: Session, part: Part, *, archived: bool) -> bool:
    """Drops a sealed part and records it, in one transaction.

    Args:
        session: the one that holds the lock.
        part: the part.
        archived: whether the part must be archived.

    Returns:
        False when it cannot be dropped now: a query reads history, the part is gone, or it must be
        archived first.

    Raises:
        SessionLost, PostgresUnavailable: it may or may not be dropped.
    """
    try:
        return bool(await session.fetchval("history.drop", part.day, part.number, archived))
    except LockConflict:
        return False


async def movable(
    executor: Any, before: datetime, limit: int
) -> tuple[int, datetime | None, datetime | None]:
    """How many tasks ended before a moment, up to `limit`, and their first and last end.

    Raises:
        PostgresUnavailable: no server.
    """
    [row] = await fetch(executor, "history.movable", before, limit)
    return row["tasks"], row["first"], row["last"]


async def now(executor: Any) -> datetime:
    """The server's time, which the rows are compared with.

    Raises:
        PostgresUnavailable: no server.
    """
    moment: datetime = await fetchval(executor, "history.now")
    return moment


def as_task(row: Mapping[str, Any] | asyncpg.Record) -> dict[str, Any]:
    """A row of history in the shape of `penstock.postgres.tasks.get`."""
    return {
        **row,
        "attempt": count_of(row["attempt"]),
        # Columns of unfinished tasks only.
        "pausing": False,
        "due_at": None,
        "attempts": [with_moments(attempt) for attempt in orjson.loads(row["attempts"])],
        "callbacks_owed": [with_moments(callback) for callback in orjson.loads(row["callbacks_owed"])],
    }


def with_moments(row: dict[str, Any]) -> dict[str, Any]:
    """A row that PostgreSQL wrote as JSON, with its moments as `datetime`."""
    moments = {name: datetime.fromisoformat(row[name]) for name in _MOMENTS if row.get(name)}
    return row | moments
