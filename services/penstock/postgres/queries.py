"""Named queries: a file of `schemas/postgres/queries` has each after a line `-- name: <name>`.

`{{history_columns}}` in a query stands for that list of `penstock.postgres.columns`, and
`{{t.history_columns}}` for the same list with `t.` before each column. `{{$2.release_position}}`
are the elements of the parameter `$2`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import asyncpg

from penstock.contracts.files import schemas_folder
from penstock.postgres.columns import expanded
from penstock.postgres.connection import translated

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_LIST = re.compile(r"\{\{(?:([\w$]+)\.)?(\w+)\}\}")


@cache
def load(file: str) -> dict[str, str]:
    """Returns all queries of one file, by name."""
    text = (schemas_folder() / "postgres" / "queries" / f"{file}.sql").read_text(encoding="utf-8")
    text = _LIST.sub(lambda match: expanded(match[2], match[1] or ""), text)
    parts = _NAME.split(text)[1:]
    return dict(zip(parts[::2], (body.strip() for body in parts[1::2]), strict=True))


def query(name: str) -> str:
    """Returns one query, named `<file>.<name>`."""
    file, _, short = name.partition(".")
    return load(file)[short]


async def fetch(executor: Any, name: str, *arguments: Any) -> list[asyncpg.Record]:
    """The rows of a named query, with the errors of `connection.translated`.

    Args:
        executor: a pool or a connection.
        name: of the query.
        arguments: of the query.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(query(name), *arguments)
    return rows


async def fetchrow(executor: Any, name: str, *arguments: Any) -> Any:
    """As `fetch`, the first row; None without one."""
    with translated():
        return await executor.fetchrow(query(name), *arguments)


async def fetchval(executor: Any, name: str, *arguments: Any) -> Any:
    """As `fetch`, the first value of the first row; None without one."""
    with translated():
        return await executor.fetchval(query(name), *arguments)


async def execute(executor: Any, name: str, *arguments: Any) -> None:
    """As `fetch`, for a statement without rows."""
    with translated():
        await executor.execute(query(name), *arguments)


@asynccontextmanager
async def transaction(
    pool: asyncpg.Pool[asyncpg.Record],
) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy[asyncpg.Record]]:
    """A connection in a transaction, with the errors of `connection.translated`."""
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            yield connection
