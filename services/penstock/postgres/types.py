"""Task types: one row each, copied into every service that needs them and kept fresh by notification."""

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

# Notified with a type's name when it is registered or changed.
CHANNEL = "penstock_types"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskType:
    """One row of `task_type`, and the body of `POST /types`; fields as in `task-type.schema.json`."""

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
    # None leaves it as it is; of a row that was read it never is.
    paused: bool | None = None
    max_in_flight: int | None = None
    starts_per_s: float | None = None
    max_per_key: int | None = None
    fair: bool = False
    ageing_s: float | None = None
    finish_first: bool = False

    @property
    def ordered(self) -> bool:
        """Whether it has an order of its own."""
        return self.ageing_s is not None or self.finish_first

    @property
    def policy(self) -> RetryPolicy:
        """How its stages are retried."""
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
        """Reads a document that `task-type.schema.json` has let through.

        Raises:
            InvalidRecord: its fields contradict each other, or a target can never be called.
        """
        found = cls(**{**raw, "callbacks": subscription.read(raw.get("callbacks") or ())})
        problems = found.policy.problems()
        if problems:
            raise InvalidRecord("; ".join(problems), pointer="/retry_max_ms")
        if found.ordered and (found.fair or found.max_per_key is not None):
            wrong = "ageing_s" if found.ageing_s is not None else "finish_first"
            raise InvalidRecord("does not go together with fair and max_per_key", pointer=f"/{wrong}")
        return found

    def to_wire(self) -> dict[str, Any]:
        """The JSON object, secrets and all."""
        return {**self._fields(), "callbacks": subscription.to_wire(self.callbacks)}

    def shown(self) -> dict[str, Any]:
        """The JSON object as answers have it: without the values of headers."""
        return {**self._fields(), "callbacks": subscription.shown(self.callbacks)}

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


async def register(pool: asyncpg.Pool[asyncpg.Record], wanted: TaskType) -> tuple[TaskType, bool]:
    """Inserts or changes a type; returns it as it is now and whether it is new.

    Raises:
        Conflict: the number of partitions cannot be changed, or its order does not go together with what was said of keys.
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            # What is said of its keys meanwhile is seen; of one that is not there nothing is said.
            await connection.fetchrow(query("types.lock"), wanted.name)
            row = await _kept(connection, wanted)
            found = _from_row(row)
            if found.partitions != wanted.partitions:
                raise Conflict(
                    f"type {wanted.name} has {found.partitions} partitions, which cannot be changed "
                    f"(asked for {wanted.partitions}): register a new type instead"
                )
            return found, row["created"]


async def change(
    pool: asyncpg.Pool[asyncpg.Record], name: str, merge: Callable[[TaskType], TaskType]
) -> TaskType:
    """Changes a type by what it is; returns it as it is now.

    Args:
        pool: of the database.
        name: of the type.
        merge: from the type as it is, to the type as it shall be; what it raises changes nothing.

    Raises:
        NotFound: there is none of this name.
        Conflict: its order does not go together with what was said of keys.
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            row = await connection.fetchrow(query("types.lock"), name)
            if row is None:
                raise NotFound(f"there is no task type {name!r}")
            return _from_row(await _kept(connection, merge(_from_row(row))))


async def _kept(connection: Any, wanted: TaskType) -> asyncpg.Record:
    try:
        row: asyncpg.Record = await connection.fetchrow(query("types.register"), *wanted.columns())
    except asyncpg.CheckViolationError as error:
        # Whatever else could break a check, the schema has refused.
        raise Conflict(
            f"type {wanted.name} has settings of keys, which do not go together with ageing_s and finish_first: "
            "reset them first"
        ) from error
    return row


async def all_types(pool: asyncpg.Pool[asyncpg.Record]) -> dict[str, TaskType]:
    """Every registered type, by name.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        return {row["name"]: _from_row(row) for row in await pool.fetch(query("types.all"))}


async def owners(pool: asyncpg.Pool[asyncpg.Record]) -> dict[str, str | None]:
    """By type which process of task-sync releases it, as host and process id; None where none does now.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await pool.fetch(query("types.owners"))
    return {row["type"]: row["session"] and row["session"].rpartition(" ")[2] for row in rows}


def _from_row(row: asyncpg.Record) -> TaskType:
    fields = {name: row[name] for name in TaskType.__slots__}
    return TaskType(**{**fields, "callbacks": subscription.from_columns(row["callbacks"])})


class KnownTypes:
    """A copy of all types: fresh by notification, and reloaded on a miss.

    A flood of unknown names must not become a flood of queries, so misses reload at most once a second.

    Args:
        pool: where to read them.
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
        """The type as last read."""
        return self._types.get(name)

    def outdated(self) -> None:
        """A notification came: the next look-up reads again."""
        self._outdated = True

    async def require(self, names: Iterable[str]) -> None:
        """Sees to it that the copy is fresh and, as far as they exist, holds all of `names`.

        Raises:
            PostgresUnavailable: no server.
        """
        missing = not all(name in self._types for name in names)
        recent = asyncio.get_running_loop().time() - self._loaded_s < 1.0
        if self._outdated or (missing and not recent):
            await self.load()

    async def load(self) -> None:
        """Reads all types.

        Raises:
            PostgresUnavailable: no server.
        """
        async with self._loading:
            # Before the query: a notification that comes while it runs must be followed by another.
            self._outdated = False
            try:
                self._types = await all_types(self._pool)
            except BaseException:
                # Nothing was read: the next who asks tries again, also after a cancellation.
                self._outdated = True
                raise
            self._loaded_s = asyncio.get_running_loop().time()
