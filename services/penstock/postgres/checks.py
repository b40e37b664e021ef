"""The queries of `penstock check` and its repairs (checks.sql)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import asyncpg

from penstock.core.attempt import AttemptId
from penstock.core.target import TargetId
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.session import Session
from penstock.postgres.targets import target_columns

Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

# Rows that a cursor fetches at a time.
PAGE = 10_000
# Rows that one statement of a repair changes.
BATCH = 1_000


async def task_counts(pool: Pool) -> dict[str, int]:
    """Tasks by state.

    Raises:
        PostgresUnavailable: no server.
    """
    return {row["state"]: row["tasks"] for row in await _fetch(pool, "states")}


async def callback_counts(pool: Pool) -> dict[str, int]:
    """Callbacks by state.

    Raises:
        PostgresUnavailable: no server.
    """
    return {row["state"]: row["callbacks"] for row in await _fetch(pool, "callback_states")}


async def offenders(pool: Pool, rule: str, *arguments: object) -> list[asyncpg.Record]:
    """The first rows that break a rule, each with the number of all (`found`).

    Args:
        pool: of the database.
        rule: name of its query.
        arguments: how many rows to return, and the rule's own.

    Raises:
        PostgresUnavailable: no server.
    """
    return await _fetch(pool, rule, *arguments)


async def now(pool: Pool) -> datetime:
    """The database's time.

    Raises:
        PostgresUnavailable: no server.
    """
    [row] = await _fetch(pool, "now")
    found: datetime = row["now"]
    return found


async def queued_types(pool: Pool, since: datetime) -> list[str]:
    """Types of tasks that have been queued since before `since`.

    Raises:
        PostgresUnavailable: no server.
    """
    return [row["type"] for row in await _fetch(pool, "queued_types", since)]


async def tasks_in_releases(pool: Pool, limit: int) -> set[int]:
    """Tasks whose release Kafka has not confirmed yet, at most `limit`.

    Raises:
        PostgresUnavailable: no server.
    """
    return {row["id"] for row in await _fetch(pool, "noted", limit)}


async def queued(pool: Pool, since: datetime) -> AsyncIterator[list[tuple[str, AttemptId]]]:
    """Types and attempts of the tasks that have been queued since before `since`, a page at a time.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            cursor = await connection.cursor(query("checks.queued"), since)
            while rows := await cursor.fetch(PAGE):
                yield [(row["type"], AttemptId(row["id"], row["step"], row["attempt"])) for row in rows]


async def release_again(pool: Pool, attempt_ids: Sequence[AttemptId], since: datetime) -> int:
    """Makes ready tasks that are queued in these attempts since before `since`; returns how many.

    Raises:
        PostgresUnavailable: perhaps no task is.
    """
    rows = await _fetch(
        pool,
        "release_again",
        [attempt_id.task_id for attempt_id in attempt_ids],
        [attempt_id.step for attempt_id in attempt_ids],
        [attempt_id.attempt for attempt_id in attempt_ids],
        since,
    )
    return len(rows)


async def ready_types(pool: Pool, grace_s: float) -> list[asyncpg.Record]:
    """Types with tasks that have been ready for longer than `grace_s`.

    Each row has the first task, the number of tasks, and whether the type is `owned` by a task-sync
    and `limited`.

    Raises:
        PostgresUnavailable: no server.
    """
    return await _fetch(pool, "ready", grace_s)


async def wake(pool: Pool, types: Sequence[str]) -> None:
    """Notifies the owners of types of ready tasks.

    Raises:
        PostgresUnavailable: no server.
    """
    await _fetch(pool, "wake", list(types))


async def running_by_partition(pool: Pool, partitions: int) -> list[asyncpg.Record]:
    """The running tasks of each heartbeats partition: the first one and their number.

    Raises:
        PostgresUnavailable: no server.
    """
    return await _fetch(pool, "running", partitions)


async def held_targets(pool: Pool, grace_s: float) -> list[asyncpg.Record]:
    """Targets that are normal for longer than `grace_s` and have held callbacks.

    Raises:
        PostgresUnavailable: no server.
    """
    return await _fetch(pool, "held", grace_s)


async def type_names(pool: Pool) -> list[str]:
    """The names of all registered types.

    Raises:
        PostgresUnavailable: no server.
    """
    return [row["name"] for row in await _fetch(pool, "type_names")]


async def moved(pool: Pool) -> dict[str, int]:
    """Ingest offsets that were moved in the last seven days, by reason.

    Raises:
        PostgresUnavailable: no server.
    """
    return {row["reason"]: row["positions"] for row in await _fetch(pool, "moved")}


async def missing(pool: Pool, ids: Sequence[int]) -> list[int]:
    """Those of `ids` that belong to no task, finished tasks included.

    Raises:
        PostgresUnavailable: no server.
    """
    return [row["id"] for row in await _fetch(pool, "missing", ids)]


async def note_lost(pool: Pool) -> int:
    """Marks deleted records as noted; returns how many entries.

    Raises:
        PostgresUnavailable: no server.
    """
    return len(await _fetch(pool, "note_lost"))


async def unwatched(pool: Pool, partitions: int) -> list[asyncpg.Record]:
    """The first `BATCH` running attempts without a heartbeats partition that exists.

    Raises:
        PostgresUnavailable: no server.
    """
    return await _fetch(pool, "unwatched", BATCH, partitions)


async def promote(pool: Pool, grace_s: float) -> int:
    """Makes ready what has been due for longer than `grace_s`; returns how many.

    Raises:
        PostgresUnavailable: some tasks may be, others not.
    """
    return await _repeat(pool, "promote", BATCH, grace_s)


async def mend_ahead(pool: Pool, grace_s: float) -> int:
    """Mends times of a clock that was ahead by more than `grace_s`; returns how many rows.

    Raises:
        PostgresUnavailable: some rows may be mended, others not.
    """
    mended = await _repeat(pool, "mend_tasks", BATCH, grace_s)
    mended += await _repeat(pool, "mend_callbacks", BATCH, grace_s)
    for name in ("mend_outbox", "mend_results", "mend_releases", "mend_operations"):
        mended += len(await _fetch(pool, name, grace_s))
    return mended


async def requeue_held(pool: Pool, targets: Sequence[TargetId]) -> int:
    """Makes due the callbacks that are held for targets, if these are normal; returns how many.

    Raises:
        PostgresUnavailable: some callbacks may be, others not.
    """
    return await _repeat(pool, "requeue_held", BATCH, *target_columns(targets))


async def unsent_types(pool: Pool, grace_s: float) -> list[str]:
    """Types with releases that Kafka has not confirmed for longer than `grace_s`.

    Raises:
        PostgresUnavailable: no server.
    """
    return sorted({row["type"] for row in await _fetch(pool, "unsent", BATCH, grace_s)})


async def undo_releases(session: Session, type_name: str, grace_s: float) -> int:
    """Deletes such releases of a type and makes their tasks ready again; returns how many releases.

    Args:
        session: that holds the type's lock.
        type_name: of the tasks.
        grace_s: seconds for which Kafka has not confirmed them.

    Raises:
        SessionLost, PostgresUnavailable: perhaps nothing was changed.
    """
    [row] = await session.fetch("checks.undo_releases", type_name, grace_s)
    return int(row["notes"])


async def unanswered(pool: Pool, limit: int, least: int) -> list[asyncpg.Record]:
    """Pending callbacks whose records were written at least `least` times in a row without a call.

    Raises:
        PostgresUnavailable: no server.
    """
    return await _fetch(pool, "unanswered", limit, least)


async def uncalled(pool: Pool, limit: int, since_s: float, except_ids: Sequence[str]) -> list[asyncpg.Record]:
    """Targets with published callbacks and no call for `since_s` seconds, without `except_ids`.

    Raises:
        PostgresUnavailable: no server.
    """
    return await _fetch(pool, "uncalled", limit, since_s, list(except_ids))


async def divert(pool: Pool, ids: Sequence[str], attempts: Sequence[int], published: Sequence[int]) -> int:
    """Makes callbacks due, diverted, if they are still in these attempts; returns how many.

    Raises:
        PostgresUnavailable: perhaps no callback is.
    """
    return len(await _fetch(pool, "divert", ids, attempts, published))


async def divert_uncalled(pool: Pool, targets: Sequence[TargetId], since_s: float) -> int:
    """Makes due, diverted, the callbacks that waited for targets for `since_s`; returns how many.

    Raises:
        PostgresUnavailable: some callbacks may be, others not.
    """
    return await _repeat(pool, "divert_uncalled", BATCH, *target_columns(targets), since_s)


async def _repeat(pool: Pool, name: str, *arguments: object) -> int:
    """Runs a repair of at most `BATCH` rows until it changes fewer; returns the total."""
    total = 0
    while True:
        changed = len(await _fetch(pool, name, *arguments))
        total += changed
        if changed < BATCH:
            return total


async def _fetch(pool: Pool, name: str, *arguments: Any) -> list[asyncpg.Record]:
    with translated():
        return await pool.fetch(query(f"checks.{name}"), *arguments)
