"""What operators have said of keys: paused, weight, and a limit of their own."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from penstock.errors import Conflict, NotFound
from penstock.postgres.connection import translated
from penstock.postgres.queries import query


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """What is to become of a key; None stays as it is.

    Attributes:
        paused: whether nothing of it is released.
        weight: tasks it gives in its turn.
        max_in_flight: most of its tasks that are queued or running at once; None, when `limits` is set, is its type's.
        limits: `max_in_flight` is given.
    """

    paused: bool | None = None
    weight: int | None = None
    max_in_flight: int | None = None
    limits: bool = False


async def change(
    pool: asyncpg.Pool[asyncpg.Record], type_name: str, key: str, wanted: KeyChange
) -> asyncpg.Record:
    """Changes what is said of a key; returns its row.

    Raises:
        NotFound: there is no such type.
        Conflict: the order of the type does not go together with keys.
        PostgresUnavailable: perhaps nothing was written.
    """
    try:
        with translated():
            async with pool.acquire() as connection, connection.transaction():
                # In a statement of its own, so that the next one sees what was written while it waited.
                if await connection.fetchrow(query("types.lock"), type_name) is None:
                    raise NotFound(f"there is no task type {type_name!r}")
                row: asyncpg.Record | None = await connection.fetchrow(
                    query("keys.set"),
                    type_name,
                    key,
                    wanted.paused,
                    wanted.weight,
                    wanted.max_in_flight,
                    wanted.limits,
                )
    except asyncpg.CheckViolationError:
        # The type got its order at this very moment, from a process of an earlier version.
        row = None
    if row is None:
        raise Conflict(f"type {type_name} has ageing_s or finish_first, which do not go together with keys")
    return row


async def reset(pool: asyncpg.Pool[asyncpg.Record], type_name: str, key: str) -> bool:
    """Forgets what was said of a key; False when nothing was.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            await connection.fetchrow(query("types.lock"), type_name)
            return bool(await connection.fetch(query("keys.reset"), type_name, key))


async def find(
    pool: asyncpg.Pool[asyncpg.Record], type_name: str, *, key: str | None = None, after: str = "", limit: int
) -> list[asyncpg.Record]:
    """Rows of a type by key; give the last key of a page as `after` to get the next one.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[asyncpg.Record] = await pool.fetch(query("keys.find"), type_name, after, limit, key)
    return rows
