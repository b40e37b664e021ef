"""Task types: one row each, copied into every service that needs them and kept fresh by notification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock.core.retry import RetryPolicy
from penstock.errors import Conflict, InvalidRecord
from penstock.postgres.connection import translated
from penstock.postgres.queries import query

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
            InvalidRecord: its fields contradict each other.
        """
        found = cls(**raw)
        problems = found.policy.problems()
        if problems:
            raise InvalidRecord("; ".join(problems), pointer="/retry_max_ms")
        return found

    def to_wire(self) -> dict[str, Any]:
        """The JSON object."""
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
        Conflict: the number of partitions cannot be changed.
        PostgresUnavailable: no server.
    """
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            row = await connection.fetchrow(query("types.register"), *wanted.to_wire().values())
            assert row is not None
            found = _from_row(row)
            if found.partitions != wanted.partitions:
                raise Conflict(
                    f"type {wanted.name} has {found.partitions} partitions, which cannot be changed "
                    f"(asked for {wanted.partitions}): register a new type instead"
                )
            return found, row["created"]


async def all_types(pool: asyncpg.Pool[asyncpg.Record]) -> dict[str, TaskType]:
    """Every registered type, by name.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        return {row["name"]: _from_row(row) for row in await pool.fetch(query("types.all"))}


def _from_row(row: asyncpg.Record) -> TaskType:
    return TaskType(**{name: row[name] for name in TaskType.__slots__})
