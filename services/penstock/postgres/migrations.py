"""Numbered migrations, applied in order, once each, by one process at a time."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import asyncpg

from penstock.contracts.files import schemas_folder
from penstock.core.migrating import Step, due
from penstock.postgres.connection import connect, translated
from penstock.postgres.queries import query

log = logging.getLogger(__name__)

# A migration may take as long as its table is large; who waits for it has a limit of their own.
_PATIENCE_S = 24 * 3600.0
_AGAIN_S = 1.0


async def _apply(connection: Any, name: str, text: str) -> bool:
    """Applies one; False when its tables are in use, and it has let go of all to let others pass."""
    try:
        async with connection.transaction():
            await connection.execute(text, timeout=_PATIENCE_S)
            await connection.execute(query("migrations.mark"), name)
    except asyncpg.LockNotAvailableError:
        return False
    return True


async def migrate(dsn: str, step: Step | None = None, *, folder: Path | None = None) -> list[str]:
    """Brings the schema `penstock` of a database up to date; returns the names of what it applied.

    Each migration runs in a transaction with its own mark, so a crash leaves either both or neither. It waits for a lock on a
    table for seconds only, and then tries again: what asks for the table after it would wait behind it.

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
            await connection.execute(query("migrations.lock"), timeout=_PATIENCE_S)
            await connection.execute(query("migrations.hurry"))
            await connection.execute(query("migrations.prepare"))
            done = {row["name"] for row in await connection.fetch(query("migrations.applied"))}
            applied = []
            for name in due(sorted(file.stem for file in folder.glob("*.sql")), done, step):
                while not await _apply(connection, name, (folder / f"{name}.sql").read_text()):
                    log.info("%s waits for whoever uses its tables, such as a backup", name)
                    await asyncio.sleep(_AGAIN_S)
                applied.append(name)
            return applied
    finally:
        await connection.close()
