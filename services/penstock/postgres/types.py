"""Task types: their rows, and the cache of each service, which notifications refresh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock.contracts import subscription
from penstock.contracts.subscription import Entry
from penstock.core.retry import RetryPolicy
from penstock.errors import Conflict, InvalidRecord, NotFound
from penstock.postgres.connection import translated
from penstock.postgres.queries import query

# Channel of notifications: the type in the payload was registered or changed.
CHANNEL = "penstock_types"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskType:
    """One row of `task_type`, and the body of `POST /types`; see `task-type.schema.json`."""

    name: str
    first_stage: str = "start"
    partitions: int = 8
    lease_ms: int = 300_000
    max_attempts: int = 3
    retry_base_ms: int = 1_000
    retry_factor: float = 2.0
    retry_max_ms: int = 300_000
    retry_jitter: float = 0.5
    events: str = "final"
    max_losses: int = 3
    late_results: str = "accept"
    callbacks: tuple[Entry, ...] = ()
    # None keeps the state of the registered type; a type that was read is never None.
    paused: bool | None = None
    max_in_flight: int | None = None
    starts_per_s: float | None = None
    max_per_key: int | None = None
    fair: bool = False
    ageing_s: float | None = None
    finish_first: bool = False

    @property
    def ordered(self) -> bool:
        """Whether the type has its own release order."""
        return self.ageing_s is not None or self.finish_first

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy of its stages."""
        return policy_of(
            {
                "max_attempts": self.max_attempts,
                "retry_base_ms": self.retry_base_ms,
                "retry_factor": self.retry_factor,
                "retry_max_ms": self.retry_max_ms,
                "retry_jitter": self.retry_jitter,
            }
        )

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> TaskType:
        """Reads a document that conforms to `task-type.schema.json`.

        Raises:
            InvalidRecord: fields contradict each other, or a target can never be called.
        """
        task_type = cls(**{**raw, "callbacks": subscription.read(raw.get("callbacks") or ())})
        problems = task_type.policy.problems()
        if problems:
            raise InvalidRecord("; ".join(problems), pointer="/retry_max_ms")
        if task_type.ordered and (task_type.fair or task_type.max_per_key is not None):
            field = "ageing_s" if task_type.ageing_s is not None else "finish_first"
            raise InvalidRecord("cannot be combined with fair or max_per_key", pointer=f"/{field}")
        return task_type

    def to_wire(self) -> dict[str, Any]:
        """The JSON object, with the secrets of callbacks."""
        return {**self._fields(), "callbacks": subscription.to_wire(self.callbacks)}

    def masked(self) -> dict[str, Any]:
        """The JSON object in answers, without the values of headers."""
        return {**self._fields(), "callbacks": subscription.masked(self.callbacks)}

    def columns(self) -> list[Any]:
        """The values of its row."""
        fields = {**self._fields(), "callbacks": subscription.to_columns(self.callbacks) or None}
        return list(fields.values())

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def policy_of(row: Mapping[str, Any]) -> RetryPolicy:
    """The retry policy in the columns of a row."""
    return RetryPolicy(
        max_attempts=row["max_attempts"],
        base_s=row["retry_base_ms"] / 1000,
        factor=row["retry_factor"],
        max_s=row["retry_max_ms"] / 1000,
        jitter=row["retry_jitter"],
    )


async def register(pool: asyncpg.Pool[asyncpg.Record], task_type: TaskType) -> tuple[TaskType, bool]:
    """Inserts or changes a type; returns the current type, and whether it is new.

    Raises:
        Conflict: the number of partitions would change, or its order contradicts the settings of
            its concurrency keys.
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            # The lock excludes concurrent changes of the type's keys, which the upsert checks.
            await connection.fetchrow(query("types.lock"), task_type.name)
            row = await _upsert(connection, task_type)
            registered = _from_row(row)
            if registered.partitions != task_type.partitions:
                raise Conflict(
                    f"type {task_type.name} has {registered.partitions} partitions, which cannot be changed "
                    f"(asked for {task_type.partitions}): register a new type instead"
                )
            return registered, row["created"]


async def change(
    pool: asyncpg.Pool[asyncpg.Record], name: str, merge: Callable[[TaskType], TaskType]
) -> TaskType:
    """Changes a type; returns the current type.

    Args:
        pool: the database.
        name: name of the type.
        merge: makes the new type from the current one; an error that it raises changes nothing.

    Raises:
        NotFound: there is no type with this name.
        Conflict: its order contradicts the settings of its concurrency keys.
        PostgresUnavailable: the database is unavailable; repeating the call is safe.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            row = await connection.fetchrow(query("types.lock"), name)
            if row is None:
                raise NotFound(f"there is no task type {name!r}")
            return _from_row(await _upsert(connection, merge(_from_row(row))))


async def _upsert(connection: Any, task_type: TaskType) -> asyncpg.Record:
    try:
        row: asyncpg.Record = await connection.fetchrow(query("types.register"), *task_type.columns())
    except asyncpg.CheckViolationError as error:
        # The JSON Schema excludes all other violations.
        raise Conflict(
            f"type {task_type.name} has settings of concurrency keys, which cannot be combined with ageing_s "
            "or finish_first: reset them first"
        ) from error
    return row


async def all_types(pool: asyncpg.Pool[asyncpg.Record]) -> dict[str, TaskType]:
    """All registered types, by name.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    with translated():
        return {row["name"]: _from_row(row) for row in await pool.fetch(query("types.all"))}


async def owners(pool: asyncpg.Pool[asyncpg.Record]) -> dict[str, str | None]:
    """By type, the task-sync process that releases it, as host and process id; None without one.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    with translated():
        rows = await pool.fetch(query("types.owners"))
    return {row["type"]: row["session"] and row["session"].rpartition(" ")[2] for row in rows}


def _from_row(row: asyncpg.Record) -> TaskType:
    fields = {name: row[name] for name in TaskType.__slots__}
    return TaskType(**{**fields, "callbacks": subscription.from_columns(row["callbacks"])})


class TypeCache:
    """A cache of all types, reloaded after a notification or a miss.

    Misses reload it at most once a second, so that many unknown names do not cause many queries.

    Args:
        pool: the database.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._types: dict[str, TaskType] = {}
        self._outdated = True
        self._loaded_s = float("-inf")
        self._loading = asyncio.Lock()

    def __iter__(self) -> Iterator[TaskType]:
        return iter(list(self._types.values()))

    def get(self, name: str) -> TaskType | None:
        """The cached type; None when the cache has no such type."""
        return self._types.get(name)

    def mark_outdated(self) -> None:
        """Makes the next `require` reload the cache."""
        self._outdated = True

    async def require(self, names: Iterable[str]) -> None:
        """Reloads the cache when it is outdated, or when it lacks one of `names`.

        Raises:
            PostgresUnavailable: the database is unavailable.
        """
        missing = not all(name in self._types for name in names)
        recent = asyncio.get_running_loop().time() - self._loaded_s < 1.0
        if self._outdated or (missing and not recent):
            await self.load()

    async def load(self) -> None:
        """Reads all types.

        Raises:
            PostgresUnavailable: the database is unavailable.
        """
        async with self._loading:
            # Before the query, so that a change during the query causes another one.
            self._outdated = False
            try:
                self._types = await all_types(self._pool)
            except BaseException:
                # Nothing was read, also when the caller was cancelled: the next caller tries again.
                self._outdated = True
                raise
            self._loaded_s = asyncio.get_running_loop().time()
