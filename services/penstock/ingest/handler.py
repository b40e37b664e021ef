"""The handler of one kind of record, as ingest uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.kafka.topology.topics import Topic
from penstock.postgres.ingest_positions import OffsetRange

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Gathering:
    """How much a partition gathers before its records are inserted together.

    Attributes:
        rows: records.
        size_bytes: of their values.
        seconds: since the first of them was read; the records do not wait longer.
    """

    rows: int
    size_bytes: int
    seconds: float


class RecordReader(Protocol[T_co]):
    """Reads the records of a batch."""

    async def read(self, record: Any) -> T_co:
        """The submission of a record; large values are in the object store.

        Raises:
            Invalid: the record breaks its contract.
            ObjectsUnavailable: it has a large value, and the store is away.
            PostgresUnavailable: what it names could not be read.
        """
        ...


class RecordHandler(Protocol[T]):
    """One kind of record.

    Attributes:
        topic: of the records.
        rejected_topic: for those that break their contract.
    """

    @property
    def topic(self) -> Topic: ...  # noqa: D102 (see the class)

    @property
    def rejected_topic(self) -> Topic: ...  # noqa: D102 (see the class)

    def open_batch(self) -> RecordReader[T]:
        """The reader of a batch. It may remember what it looked up, until the end of the batch."""
        ...

    async def insert(self, items: Sequence[T], source: OffsetRange) -> None:
        """Inserts a batch, and moves the stored offset in the same statement.

        Raises:
            SessionLost: another process has moved the offset; nothing was inserted.
            ValueRefused, IdempotencyConflict: one of them is refused; nothing was inserted.
            LockConflict: another transaction locks what one of them needs; nothing was inserted.
            ObjectsUnavailable: the object store is away; nothing was inserted.
            PostgresUnavailable: nothing was inserted, or all of it.
        """
        ...
