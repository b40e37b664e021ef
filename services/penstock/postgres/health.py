"""The health of the database: it answers, has the tables of this version, and takes writes."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

from penstock.contracts.files import schemas_folder
from penstock.core.migration_steps import expected
from penstock.errors import PostgresUnavailable
from penstock.postgres import refused_writes
from penstock.postgres.connection import open_pool, translated
from penstock.postgres.queries import query

PROBE_S = 3.0


async def ping(dsn: str, *, pooled: bool) -> None:
    """Checks that the server answers on a new connection: a pool's may all wait for a lock.

    A connection has ten seconds for each host of the URL, so that a silent one hides no other.

    Args:
        dsn: of the pool.
        pooled: whether it leads to a pooler, which accepts connections while its server is away.

    Raises:
        PostgresUnavailable: no host accepts a connection, or there is no answer within `PROBE_S`.
        SettingsError: it refuses the user.
    """
    async with open_pool(dsn, "ping", size=1, pooled=pooled) as pool:
        try:
            async with asyncio.timeout(PROBE_S):
                await missing_migrations(pool)
        except TimeoutError as error:
            raise PostgresUnavailable(f"the database does not answer within {PROBE_S:g} s") from error


async def missing_migrations(executor: Any) -> list[str]:
    """The migrations that this version needs and the database lacks.

    Raises:
        PostgresUnavailable: no server.
    """
    folder = schemas_folder() / "postgres" / "migrations"
    wanted = expected(sorted(file.stem for file in folder.glob("*.sql")))
    with translated():
        try:
            done = {row["name"] for row in await executor.fetch(query("migrations.applied"))}
        except asyncpg.UndefinedTableError:
            return wanted
    return [name for name in wanted if name not in done]


async def probe(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Checks that the database answers, is migrated, and has taken the last writes.

    Raises:
        PostgresUnavailable: it does not answer within `PROBE_S`, lacks migrations, or has refused a
            write of this process a moment ago.
    """
    try:
        async with asyncio.timeout(PROBE_S):
            missing = await missing_migrations(pool)
    except TimeoutError as error:
        raise PostgresUnavailable(f"the database does not answer within {PROBE_S:g} s") from error
    if missing:
        raise PostgresUnavailable(f"migrations are missing ({', '.join(missing)}): run `penstock migrate`")
    refused_writes.ensure_none()
