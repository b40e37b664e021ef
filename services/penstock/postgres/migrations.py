"""Applies numbered migrations in order, each once, from one process at a time."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import asyncpg

from penstock.contracts.files import schemas_folder
from penstock.core.migration_steps import Step, due
from penstock.postgres.connection import connect, translated
from penstock.postgres.queries import query

log = logging.getLogger(__name__)

# The time of a migration grows with its table, so the limit is generous.
_TIMEOUT_S = 24 * 3600.0
_RETRY_S = 1.0


async def _apply(connection: Any, name: str, text: str) -> bool:
    """Applies one migration; returns False when another session locks one of its tables."""
    try:
        async with connection.transaction():
            await connection.execute(text, timeout=_TIMEOUT_S)
            await connection.execute(query("migrations.mark"), name)
    except asyncpg.LockNotAvailableError:
        return False
    return True


async def migrate(dsn: str, step: Step | None = None, *, folder: Path | None = None) -> list[str]:
    """Migrates the schema `penstock` of a database and returns the names of the applied migrations.

    Each migration commits together with its row in `migration`, so a crash leaves both or neither.
    It waits two seconds for a table lock and then retries, because all later queries of the table
    would queue behind it.

    Args:
        dsn: connection URL of a session (not of a pooler).
        step: the step of a rolling upgrade; None is both.
        folder: the folder of the migrations; None is that of this version.

    Raises:
        PostgresUnavailable: no server answers.
        CannotStart: another step must run first.
    """
    folder = folder or schemas_folder() / "postgres" / "migrations"
    connection = await connect(dsn, "migrate")
    try:
        with translated():
            # Two processes must not migrate at once. The lock ends with the session.
            await connection.execute(query("migrations.lock"), timeout=_TIMEOUT_S)
            await connection.execute(query("migrations.limit_lock_wait"))
            await connection.execute(query("migrations.prepare"))
            done = {row["name"] for row in await connection.fetch(query("migrations.applied"))}
            applied = []
            for name in due(sorted(file.stem for file in folder.glob("*.sql")), done, step):
                while not await _apply(connection, name, (folder / f"{name}.sql").read_text()):
                    log.info(
                        "A migration waits for another session that locks its tables, such as a backup",
                        extra={"event": "migration_blocked", "migration": name},
                    )
                    await asyncio.sleep(_RETRY_S)
                applied.append(name)
            return applied
    finally:
        await connection.close()
