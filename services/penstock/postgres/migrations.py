"""Numbered migrations, applied in order, once each, by one process at a time."""

from __future__ import annotations

from penstock.contracts.files import schemas_folder
from penstock.postgres.connection import connect, translated
from penstock.postgres.queries import query


async def migrate(dsn: str) -> list[str]:
    """Brings the schema `penstock` of a database up to date; returns the names of what it applied.

    Each migration runs in a transaction with its own mark, so a crash leaves either both or neither.

    Raises:
        PostgresUnavailable: no server.
    """
    connection = await connect(dsn, "migrate")
    try:
        with translated():
            # Two processes that start together must not both migrate; the lock ends with the session.
            await connection.execute(query("migrations.lock"))
            await connection.execute(query("migrations.prepare"))
            done = {row["name"] for row in await connection.fetch(query("migrations.applied"))}
            applied = []
            for file in sorted((schemas_folder() / "postgres" / "migrations").glob("*.sql")):
                if file.stem in done:
                    continue
                async with connection.transaction():
                    await connection.execute(file.read_text())
                    await connection.execute(query("migrations.mark"), file.stem)
                applied.append(file.stem)
            return applied
    finally:
        await connection.close()
