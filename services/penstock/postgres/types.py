"""Task types: their rows, and the cache of each service, which notifications refresh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from penstock.contracts import subscription
from penstock.contracts.task_type import TaskType
from penstock.core.access import namespace_of
from penstock.errors import Conflict, InvalidRecord, NotFound
from penstock.postgres.queries import fetch, fetchrow, fetchval, transaction

# Channel of notifications: the type in the payload was registered or changed.
CHANNEL = "penstock_types"


@dataclass(frozen=True, slots=True)
class TypeLimits:
    """Limits for new types: one namespace must not use up what all share.

    Attributes:
        types: most types of a namespace.
        partitions: most partitions of a type.
    """

    types: int
    partitions: int


# Told a type before and after its change; None for a new type.
Observer = Callable[[TaskType | None, TaskType], None]


async def register(
    pool: asyncpg.Pool[asyncpg.Record],
    task_type: TaskType,
    limits: TypeLimits | None = None,
    observe: Observer | None = None,
) -> tuple[TaskType, bool]:
    """Inserts or changes a type; returns the current type, and whether it is new.

    Args:
        pool: the database.
        task_type: the type.
        limits: for a new type; None is without limits.
        observe: told the type before and after, in the transaction.

    Raises:
        InvalidRecord: a new type has too many partitions.
        Conflict: the namespace of a new type has too many types.
        Conflict: the number of partitions would change, or its order contradicts the settings of
            its concurrency keys.
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    async with transaction(pool) as connection:
        # The lock excludes concurrent changes of the type's keys, which the upsert checks.
        existing = await fetchrow(connection, "types.lock", task_type.name)
        if existing is None and limits is not None:
            await _ensure_within_limits(connection, task_type, limits)
        row = await _upsert(connection, task_type)
        registered = _from_row(row)
        if registered.partitions != task_type.partitions:
            raise Conflict(
                f"type {task_type.name} has {registered.partitions} partitions, which cannot be changed "
                f"(asked for {task_type.partitions}): register a new type instead"
            )
        if observe is not None:
            observe(None if existing is None else _from_row(existing), registered)
        return registered, row["created"]


async def _ensure_within_limits(connection: Any, task_type: TaskType, limits: TypeLimits) -> None:
    """Raises unless a new type is within the limits; holds a lock until the transaction ends."""
    if task_type.partitions > limits.partitions:
        raise InvalidRecord(
            f"{task_type.partitions} partitions are more than the {limits.partitions} that "
            "PENSTOCK_GATEWAY_TYPE_PARTITIONS allows for a type",
            pointer="/partitions",
        )
    namespace = namespace_of(task_type.name)
    await fetch(connection, "types.lock_namespace", namespace)
    # A statement of its own: it sees the types that others registered while this one waited.
    if await fetchval(connection, "types.count", namespace) >= limits.types:
        raise Conflict(
            f"the namespace {namespace} has {limits.types} types or more, which is the most that "
            "PENSTOCK_GATEWAY_NAMESPACE_TYPES allows: use an existing type, or ask the operator to raise the limit"
        )


async def change(
    pool: asyncpg.Pool[asyncpg.Record],
    name: str,
    merge: Callable[[TaskType], TaskType],
    observe: Observer | None = None,
) -> TaskType:
    """Changes a type; returns the current type.

    Args:
        pool: the database.
        name: name of the type.
        merge: makes the new type from the current one; an error that it raises changes nothing.
        observe: told the type before and after, in the transaction.

    Raises:
        NotFound: there is no type with this name.
        Conflict: its order contradicts the settings of its concurrency keys.
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    async with transaction(pool) as connection:
        row = await fetchrow(connection, "types.lock", name)
        if row is None:
            raise not_found(name)
        before = _from_row(row)
        after = _from_row(await _upsert(connection, merge(before)))
        if observe is not None:
            observe(before, after)
        return after


def not_found(name: str) -> NotFound:
    """The error for a type that does not exist, or is not visible."""
    return NotFound(f"there is no task type {name!r}")


async def _upsert(connection: Any, task_type: TaskType) -> asyncpg.Record:
    try:
        [row] = await fetch(connection, "types.register", **task_type.columns())
    except asyncpg.CheckViolationError as error:
        # The JSON Schema excludes all other violations.
        raise Conflict(
            f"type {task_type.name} has settings of concurrency keys, which cannot be combined with "
            f"finish_first: `penstock types keys reset {task_type.name} KEY` removes those of a key"
        ) from error
    return row


async def all_types(pool: asyncpg.Pool[asyncpg.Record]) -> dict[str, TaskType]:
    """All registered types, by name.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return {row["name"]: _from_row(row) for row in await fetch(pool, "types.all")}


async def named(pool: asyncpg.Pool[asyncpg.Record], names: Collection[str]) -> dict[str, TaskType]:
    """Those types of these names that are registered.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    return {row["name"]: _from_row(row) for row in await fetch(pool, "types.named", list(names))}


async def owners(pool: asyncpg.Pool[asyncpg.Record]) -> dict[str, str | None]:
    """By type, the task-sync process that releases it, as host and process id; None without one.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    rows = await fetch(pool, "types.owners")
    return {row["type"]: row["session"] and row["session"].rpartition(" ")[2] for row in rows}


def _from_row(row: asyncpg.Record) -> TaskType:
    fields = {name: row[name] for name in TaskType.__slots__}
    return TaskType(**{**fields, "callbacks": subscription.from_columns(row["callbacks"])})


@dataclass(slots=True)
class _LookUp:
    """One query for several callers; a caller repeats it when it has failed."""

    names: set[str] = field(default_factory=set)
    done: bool = False


class TypeCache:
    """A cache of all types. A notification makes it outdated; a type that it lacks is looked up.

    The notification of a new type may arrive after its first task. So each miss asks the database
    before the name counts as unknown. Concurrent misses share a query.

    Args:
        pool: the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._types: dict[str, TaskType] = {}
        self._outdated = True
        self._reading = asyncio.Lock()
        # Collects names until its query begins.
        self._next: _LookUp | None = None

    def __iter__(self) -> Iterator[TaskType]:
        return iter(list(self._types.values()))

    def get(self, name: str) -> TaskType | None:
        """The cached type; None when the cache has no such type."""
        return self._types.get(name)

    def mark_outdated(self) -> None:
        """Makes the next `require` reload the cache."""
        self._outdated = True

    async def require(self, names: Iterable[str]) -> None:
        """Reloads the cache when it is outdated; looks up those of `names` that it lacks.

        Raises:
            PostgresUnavailable: the database is unavailable.
        """
        wanted = set(names)
        if self._outdated:
            await self.load()
        if wanted - self._types.keys():
            await self._look_up(wanted - self._types.keys())

    async def load(self) -> None:
        """Reads all types.

        Raises:
            PostgresUnavailable: the database is unavailable.
        """
        async with self._reading:
            # Before the query, so that a change during the query causes another one.
            self._outdated = False
            try:
                self._types = await all_types(self._pool)
            except BaseException:
                # Nothing was read, also when the caller was cancelled: the next caller tries again.
                self._outdated = True
                raise

    async def _look_up(self, names: set[str]) -> None:
        look_up = self._next = self._next or _LookUp()
        look_up.names |= names
        async with self._reading:
            # Otherwise another caller has asked for these names since.
            if not look_up.done:
                self._next = None if self._next is look_up else self._next
                self._types = {**self._types, **await named(self._pool, look_up.names)}
                look_up.done = True
