"""The manifest of task logs: one row for each segment, written with the offset of its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from penstock.core.log_limits import LATEST_MS
from penstock.core.log_segment import Segment, filter_hashes
from penstock.postgres.ingest_positions import OffsetRange, offset_parameters, offsets_passed
from penstock.postgres.queries import execute, fetch, fetchval
from penstock.postgres.session import Session


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment that may have lines of a task.

    Attributes:
        object_key: of its object.
        size: of its object, in bytes.
    """

    object_key: str
    size: int


@dataclass(frozen=True, slots=True)
class StoredLog:
    """What the object store has of a task's log.

    Attributes:
        segments: in the order of their offsets.
        next_offset: the lines from here on are only on the topic; None when no segment was ever
            written.
        identity: of the log of this offset.
    """

    segments: tuple[StoredSegment, ...]
    next_offset: int | None
    identity: str | None


async def insert(
    executor: Any, source: OffsetRange, object_key: str | None, segment: Segment | None, partitions: int
) -> None:
    """Inserts the row of a segment, and moves the stored offset in the same statement.

    Args:
        executor: a pool or a connection.
        source: where its records were read.
        object_key: of the stored object; None without one.
        segment: the segment; None when the records have no lines.
        partitions: of the topic.

    Raises:
        SessionLost: another process has moved the offset; nothing was inserted.
        PostgresUnavailable: the row is there, or not.
    """
    moved = await fetch(
        executor,
        "task_logs.insert",
        **offset_parameters(source),
        object_key=object_key,
        partitions=partitions,
        size=segment and len(segment.data),
        raw_size=segment and segment.raw_bytes,
        lines=segment and segment.lines,
        runs=segment and segment.runs,
        begin_at=segment and _moment(segment.begin_ms),
        end_at=segment and _moment(segment.end_ms),
        tasks=segment and segment.filter,
    )
    if not moved:
        raise offsets_passed(source)


async def find(
    executor: Any, task_id: int, begin: datetime, end: datetime, topic: str, partitions: int
) -> StoredLog:
    """The segments that may have lines of a task, and how far its partition has been stored.

    Args:
        executor: a pool or a connection.
        task_id: of the task.
        begin: its lines are of this moment or later.
        end: they are of this moment or earlier.
        topic: full name of the topic.
        partitions: how many the topic has.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(
        executor,
        "task_logs.find",
        task=task_id,
        since=begin,
        until=end,
        topic=topic,
        partitions=partitions,
        hashes=list(filter_hashes(task_id)),
    )
    segments = tuple(StoredSegment(row["object_key"], row["size"]) for row in rows if row["object_key"])
    return StoredLog(segments, rows[0]["next_offset"], rows[0]["identity"])


async def lock(session: Session) -> bool:
    """Locks retention for as long as this session lives; returns whether it did.

    Raises:
        PostgresUnavailable, SessionLost: no server.
    """
    return bool((await session.fetch("task_logs.lock"))[0]["locked"])


async def expire(session: Session, before: datetime, most: int) -> list[str]:
    """Deletes the rows of segments that ended before a moment; returns their objects."""
    return [row["object_key"] for row in await session.fetch("task_logs.expire", before, most)]


async def forget_deletions(session: Session, before: datetime) -> None:
    """Forgets which logs were hidden before a moment; their segments are gone."""
    await session.fetch("task_logs.forget_deletions", before)


async def known_objects(session: Session, object_keys: Sequence[str]) -> set[str]:
    """Those of the objects that belong to a segment."""
    return {row["object_key"] for row in await session.fetch("task_logs.known_objects", list(object_keys))}


async def now(session: Session) -> datetime:
    """The database's clock."""
    found: datetime = (await session.fetch("task_logs.now"))[0]["now"]
    return found


async def delete_log(executor: Any, task_id: int) -> None:
    """Hides the log of a task.

    Raises:
        PostgresUnavailable: no server.
    """
    await execute(executor, "task_logs.delete_log", task_id)


async def is_deleted(executor: Any, task_id: int) -> bool:
    """Whether the log of a task is hidden.

    Raises:
        PostgresUnavailable: no server.
    """
    return bool(await fetchval(executor, "task_logs.is_deleted", task_id))


def _moment(milliseconds: int) -> datetime:
    # A worker's clock may be anywhere, and each record must have a segment.
    return datetime.fromtimestamp(max(0, min(milliseconds, LATEST_MS)) / 1000, UTC)
