"""One kind of submission: the steps from the entry of a producer to its row."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

from penstock.contracts.parsing import parse
from penstock.contracts.validation import problems
from penstock.core.access import namespace_of
from penstock.errors import Invalid, InvalidRecord, one_or_all
from penstock.objects import ObjectStore
from penstock.postgres.ingest_positions import OffsetRange

# A submission as its producer sends it, as it is inserted, and what it became.
S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")


def everything(_name: str) -> bool:
    """Shows every name: records of Kafka have no API key."""
    return True


class SubmissionKind(ABC, Generic[S, T, R]):
    """The steps `decode`, `admit`, `store` and `insert`, in this order.

    Args:
        objects: stores large values.

    Attributes:
        schema: name of the schema in `schemas/messages`.
        name_field: the field of an item whose value begins with the namespace.
        stored_field: the field of an item that may be in the object store.
        span_attribute: of the span of a submission, for the name; None if it has no span.
    """

    schema: ClassVar[str]
    name_field: ClassVar[str]
    stored_field: ClassVar[str]
    span_attribute: ClassVar[str | None]

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def open_batch(self) -> Self:
        """The kind for one request or batch, which may remember what it has looked up."""
        return self

    def decode(self, entry: Any) -> S | Invalid:
        """The submission of an entry, or all its faults.

        Args:
            entry: a JSON value, its text as bytes, or the fault of an entry that cannot be parsed.
        """
        try:
            if isinstance(entry, Invalid):
                return entry
            raw = parse(entry, exact=True) if isinstance(entry, bytes) else entry
            try:
                return self.from_wire(raw)
            except Invalid as error:
                # `from_wire` stops at the first fault.
                return one_or_all(problems(raw, self.schema) or [error])
        except Invalid as error:
            return error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Validation did not foresee this content. Without the translation it would stop the
            # partition of its record, and fail the other entries of its request.
            return InvalidRecord(f"cannot be read: {error!r}")

    @abstractmethod
    def from_wire(self, raw: Any) -> S:
        """The submission of a JSON value.

        Raises:
            Invalid: its first fault.
        """

    @abstractmethod
    async def admit(
        self, decoded: Sequence[S | Invalid], visible: Callable[[str], bool] = everything
    ) -> list[T | Invalid]:
        """The items to insert, after a look at what the submissions name; faults stay faults.

        Args:
            decoded: of `decode`.
            visible: whether a producer may use a name; others count as missing.

        Raises:
            PostgresUnavailable: the database is unavailable.
        """

    async def read(self, entry: Any) -> T:
        """The item of one entry, as by `decode` and `admit`.

        Raises:
            Invalid, Faults: its faults.
            PostgresUnavailable: the database is unavailable.
        """
        [item] = await self.admit([self.decode(entry)])
        if isinstance(item, Invalid):
            raise item
        return item

    async def store(self, item: T) -> T:
        """An item whose large value is in the object store.

        Raises:
            ObjectsUnavailable: the value is large, and the store is unavailable.
        """
        value = getattr(item, self.stored_field)
        if value is None:
            return item
        # Before the row, so that each reference in PostgreSQL has its object.
        stored = await self._objects.check_in(value, namespace_of(self.name_of(item)))
        return item if stored is value else _replaced(item, **{self.stored_field: stored})

    def name_of(self, item: T) -> str:
        """The name of the type, definition or event of an item."""
        name: str = getattr(item, self.name_field)
        return name

    @abstractmethod
    async def insert(
        self, executor: Any, items: Sequence[T], source: OffsetRange | None = None
    ) -> Sequence[R]:
        """Inserts items in one statement, all of them or none; returns what each became.

        Args:
            executor: a pool, or a connection.
            items: their large values are in the object store.
            source: where the batch was read; the same statement moves the reader's offset.

        Raises:
            SessionLost: another process has moved the offset. Nothing was inserted.
            ValueRefused: PostgreSQL cannot store a value. Nothing was inserted.
            PostgresUnavailable: the database is unavailable.
        """


def traced(item: T, traceparent: str | None) -> T:
    """An item with the span of its submission; None leaves it unchanged."""
    return item if traceparent is None else _replaced(item, traceparent=traceparent)


def _replaced(item: T, **changes: Any) -> T:
    changed: T = dataclasses.replace(item, **changes)  # type: ignore[type-var]
    return changed
