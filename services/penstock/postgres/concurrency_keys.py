"""Settings of concurrency keys, made by operators: paused, weight, and a limit of the key's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock.errors import Conflict
from penstock.postgres import types
from penstock.postgres.queries import fetch, fetchrow, transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyKeyChange:
    """Changes of a key's settings; None leaves a setting as it is.

    Attributes:
        paused: whether no task of the key is released.
        weight: tasks the key releases in one round.
        max_in_flight: most of its tasks that are queued or running at once; with `sets_limit`, None
            is the type's limit.
        sets_limit: `max_in_flight` is to be changed.
    """

    paused: bool | None = None
    weight: int | None = None
    max_in_flight: int | None = None
    sets_limit: bool = False


# The settings of a key.
SETTINGS = ("paused", "weight", "max_in_flight")
# Told the settings of a key before and after their change; None where it has none.
Observer = Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None], None]


async def change(
    pool: asyncpg.Pool[asyncpg.Record],
    type_name: str,
    concurrency_key: str,
    wanted: ConcurrencyKeyChange,
    observe: Observer | None = None,
) -> asyncpg.Record:
    """Changes the settings of a key; returns its row. `observe` is told the row before and after.

    Raises:
        NotFound: there is no such type.
        Conflict: the type's order of release excludes keys.
        PostgresUnavailable: the change may or may not be written.
    """
    async with transaction(pool) as connection:
        # A statement of its own: the next statement then sees what others wrote while this one
        # waited.
        if await fetchrow(connection, "types.lock", type_name) is None:
            raise types.not_found(type_name)
        before = await _one(connection, type_name, concurrency_key)
        row: asyncpg.Record | None = await fetchrow(
            connection,
            "concurrency_keys.set",
            type=type_name,
            key=concurrency_key,
            paused=wanted.paused,
            weight=wanted.weight,
            max_in_flight=wanted.max_in_flight,
            sets_limit=wanted.sets_limit,
        )
        if observe is not None and row is not None:
            observe(before, await _one(connection, type_name, concurrency_key))
    if row is None:
        raise Conflict(
            f"type {type_name} has finish_first, which cannot be combined with settings of concurrency keys: "
            f"`penstock types set {type_name} --no-finish-first` removes it"
        )
    return row


async def reset(
    pool: asyncpg.Pool[asyncpg.Record],
    type_name: str,
    concurrency_key: str,
    observe: Observer | None = None,
) -> bool:
    """Deletes the settings of a key; False when it had none. `observe` is told what it had.

    Raises:
        PostgresUnavailable: the settings may or may not be deleted.
    """
    async with transaction(pool) as connection:
        await fetchrow(connection, "types.lock", type_name)
        before = await _one(connection, type_name, concurrency_key)
        done = bool(await fetch(connection, "concurrency_keys.reset", type_name, concurrency_key))
        if observe is not None and done:
            observe(before, None)
        return done


async def _one(connection: Any, type_name: str, concurrency_key: str) -> dict[str, Any] | None:
    rows = await fetch(
        connection, "concurrency_keys.find", type=type_name, after="", limit=1, key=concurrency_key
    )
    return {name: rows[0][name] for name in SETTINGS} if rows else None


async def find(
    pool: asyncpg.Pool[asyncpg.Record],
    type_name: str,
    *,
    concurrency_key: str | None = None,
    after: str = "",
    limit: int,
) -> list[asyncpg.Record]:
    """Settings of a type's keys, ordered by key; `after` is the last key of the page before.

    Raises:
        PostgresUnavailable: no server.
    """
    return await fetch(
        pool, "concurrency_keys.find", type=type_name, after=after, limit=limit, key=concurrency_key
    )
