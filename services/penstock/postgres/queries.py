"""Named queries: a file of `schemas/postgres/queries` has each after a line `-- name: <name>`.

A statement names its parameters (`$name`) or, with at most three, numbers them (`$1`). PostgreSQL
knows numbers only, so names get theirs in the order in which the statement first has them.

A list of `penstock.postgres.columns` stands in double braces: `{{history_columns}}` is its columns,
`{{t.history_columns}}` the same with `t.` before each, `{{$flow_event}}` an array parameter for
each, with its type, and `{{$position.release_position}}` the elements of the parameter `$position`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, NamedTuple

import asyncpg

from penstock.contracts.files import schemas_folder
from penstock.postgres.columns import expanded
from penstock.postgres.connection import translated

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_LIST = re.compile(r"\{\{(?:(\$)|([\w$]+)\.)?(\w+)\}\}")
# Comments and strings come first, so that no parameter is found in them.
_PARAMETER = re.compile(r"--[^\n]*|'[^']*'|\$(?P<name>[a-z_]\w*)|\$(?P<number>[0-9]+)")


class Statement(NamedTuple):
    """A query as the driver takes it.

    Attributes:
        text: with numbered parameters.
        parameters: the names of the parameters in the order of their numbers; empty when the query
            numbers them itself.
    """

    text: str
    parameters: tuple[str, ...]


@cache
def load(file: str) -> dict[str, Statement]:
    """Returns all queries of one file, by name.

    Raises:
        ValueError: a query has numbered and named parameters.
    """
    text = (schemas_folder() / "postgres" / "queries" / f"{file}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(_LIST.sub(lambda found: expanded(found[3], found[1] or found[2] or ""), text))[1:]
    return {
        name: _compiled(f"{file}.{name}", body.strip())
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def _compiled(name: str, text: str) -> Statement:
    numbers: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        parameter = found["name"]
        return f"${numbers.setdefault(parameter, len(numbers) + 1)}" if parameter else found[0]

    compiled = _PARAMETER.sub(numbered, text)
    if numbers and any(found["number"] for found in _PARAMETER.finditer(text)):
        raise ValueError(f"the query {name} has numbered and named parameters")
    return Statement(compiled, tuple(numbers))


@cache
def statement(name: str) -> Statement:
    """Returns one query, named `<file>.<name>`."""
    file, _, short = name.partition(".")
    return load(file)[short]


def query(name: str) -> str:
    """Returns the text of one query, named `<file>.<name>`."""
    return statement(name).text


def bound(name: str, /, *arguments: Any, **named: Any) -> tuple[Any, ...]:
    """Returns the text of a query and its arguments, as the methods of a connection take them.

    Args:
        name: of the query.
        arguments: of a query with numbered parameters.
        named: those of a query with named parameters.

    Raises:
        TypeError: an argument is missing, or the query has no such parameter.
    """
    text, parameters = statement(name)
    if len(named) == len(parameters) and not (parameters and arguments):
        try:
            return (text, *arguments, *[named[parameter] for parameter in parameters])
        except KeyError:
            pass  # the error below has all names
    raise TypeError(
        f"the query {name} got {len(arguments)} arguments without a name;"
        f" missing: {', '.join(parameter for parameter in parameters if parameter not in named) or 'none'};"
        f" unknown: {', '.join(given for given in named if given not in parameters) or 'none'}"
    )


async def fetch(executor: Any, name: str, /, *arguments: Any, **named: Any) -> list[asyncpg.Record]:
    """The rows of a named query, with the errors of `connection.translated`.

    Args:
        executor: a pool or a connection.
        name: of the query.
        arguments: as of `bound`.
        named: as of `bound`.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(*bound(name, *arguments, **named))
    return rows


async def fetchrow(executor: Any, name: str, /, *arguments: Any, **named: Any) -> Any:
    """As `fetch`, the first row; None without one."""
    with translated():
        return await executor.fetchrow(*bound(name, *arguments, **named))


async def fetchval(executor: Any, name: str, /, *arguments: Any, **named: Any) -> Any:
    """As `fetch`, the first value of the first row; None without one."""
    with translated():
        return await executor.fetchval(*bound(name, *arguments, **named))


async def execute(executor: Any, name: str, /, *arguments: Any, **named: Any) -> None:
    """As `fetch`, for a statement without rows."""
    with translated():
        await executor.execute(*bound(name, *arguments, **named))


@asynccontextmanager
async def transaction(
    pool: asyncpg.Pool[asyncpg.Record],
) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy[asyncpg.Record]]:
    """A connection in a transaction, with the errors of `connection.translated`."""
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            yield connection
