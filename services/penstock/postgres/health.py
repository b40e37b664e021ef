"""Whether the database can be worked with: it answers, and its tables are those this version expects."""

from __future__ import annotations

from typing import Any

import asyncpg

from penstock.contracts.files import schemas_folder
from penstock.postgres.connection import translated
from penstock.postgres.queries import query


async def missing_migrations(executor: Any) -> list[str]:
    """Migrations this version expects and the database has not; empty when all is well.

    Raises:
        PostgresUnavailable: no server.
    """
    expected = [file.stem for file in sorted((schemas_folder() / "postgres" / "migrations").glob("*.sql"))]
    with translated():
        try:
            done = {row["name"] for row in await executor.fetch(query("migrations.applied"))}
        except asyncpg.UndefinedTableError:
            return expected
    return [name for name in expected if name not in done]
