"""Numbered migrations, applied in order, once each, by one process at a time."""

from __future__ import annotations

from pathlib import Path

from penstock.contracts.files import schemas_folder
from penstock.core.migrating import Step, due
from penstock.postgres.connection import connect, translated
from penstock.postgres.queries import query


async def migrate(dsn: str, step: Step | None = None, *, folder: Path | None = None) -> list[str]:
    """Brings the schema `penstock` of a database up to date; returns the names of what it applied.

    Each migration runs in a transaction with its own mark, so a crash leaves either both or neither.

    Args:
        dsn: connection URL, of a session.
        step: of a rolling upgrade; None is both.
        folder: of the migrations; those of this release by default.

    Raises:
        PostgresUnavailable: no server.
        CannotStart: another step must be taken first.
    """
    folder = folder or schemas_folder() / "postgres" / "migrations"
    connection = await connect(dsn, "migrate")
    try:
        with translated():
            # Two processes that start together must not both migrate; the lock ends with the session.
            await connection.execute(query("migrations.lock"))
            await connection.execute(query("migrations.prepare"))
            done = {row["name"] for row in await connection.fetch(query("migrations.applied"))}
            applied = []
            for name in due(sorted(file.stem for file in folder.glob("*.sql")), done, step):
                async with connection.transaction():
                    await connection.execute((folder / f"{name}.sql").read_text())
                    await connection.execute(query("migrations.mark"), name)
                applied.append(name)
            return applied
    finally:
        await connection.close()
