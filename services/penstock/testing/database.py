"""A connection to no database: the statements that the services run, answered from memory.

So the code of the services itself reads and writes the rows of a pipeline's flows. A statement is
known by its name in `schemas/postgres/queries`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from penstock.postgres.columns import LISTS
from penstock.postgres.queries import query, statement

Rows = Iterable["Row"]
Statement = TypeVar("Statement", bound=Callable[..., Any])

_MARK = "_answers"


class Row(dict[str, Any]):
    """A row as the driver returns it: columns have names and positions. Others are null."""

    def __getitem__(self, column: Any) -> Any:
        return list(self.values())[column] if isinstance(column, int) else self.get(column)


def answers(*names: str) -> Callable[[Statement], Statement]:
    """Marks a method that answers a statement: it gets its arguments, named if they have names."""

    def mark(method: Statement) -> Statement:
        setattr(method, _MARK, names)
        return method

    return mark


class Connection:
    """Answers statements by the methods of objects that are marked with `answers`.

    Every call returns without waiting, so a transaction needs no lock. There is no rollback: what
    ends a transaction ends the test.
    """

    def __init__(self, *sources: object) -> None:
        self._answers: dict[str, tuple[str, Callable[..., Rows | None]]] = {}
        for source in sources:
            for attribute in dir(type(source)):
                for name in getattr(getattr(type(source), attribute), _MARK, ()):
                    self._answers[query(name)] = (name, getattr(source, attribute))

    async def fetch(self, text: str, *arguments: Any) -> list[Row]:
        """The rows of a statement."""
        name, answer = self._answers[text]
        if parameters := statement(name).parameters:
            return list(answer(**dict(zip(parameters, arguments, strict=True))) or ())
        return list(answer(*arguments) or ())

    async def fetchrow(self, statement: str, *arguments: Any) -> Row | None:
        """The first row of a statement; None without one."""
        rows = await self.fetch(statement, *arguments)
        return rows[0] if rows else None

    async def fetchval(self, statement: str, *arguments: Any) -> Any:
        """The first column of the first row of a statement; None without one."""
        row = await self.fetchrow(statement, *arguments)
        return None if row is None else row[0]

    async def execute(self, statement: str, *arguments: Any) -> None:
        """Runs a statement."""
        await self.fetch(statement, *arguments)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """This connection, as from a pool."""
        yield self

    @asynccontextmanager
    async def transaction(self, **_options: Any) -> AsyncIterator[None]:
        """A transaction."""
        yield


def rows_of(columns: Mapping[str, Sequence[Any] | None]) -> list[Row]:
    """The rows of columns. A column of None is null in each row (`sparse`)."""
    length = len(next(column for column in columns.values() if column is not None))
    filled = [[None] * length if column is None else column for column in columns.values()]
    return [Row(zip(columns, values, strict=True)) for values in zip(*filled, strict=True)]


def rows_of_list(name: str, arguments: Mapping[str, Any]) -> list[Row]:
    """As `rows_of`, for those arguments that are columns of a list of `postgres.columns`."""
    return rows_of({column: arguments[column] for column in LISTS[name]})
