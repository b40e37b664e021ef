"""Applies numbered migrations in order, each once, from one process at a time.

What this module guarantees: a migration stops no statement of a service for longer than
`_LOCK_WAIT`, and a crash leaves it applied or to be repeated. A migration is one of three kinds:

- A transaction of short statements.
- One statement that creates or drops an index `CONCURRENTLY`, which PostgreSQL cannot run in a
  transaction. A crash leaves its index invalid, and the next run builds it again.
- One statement that fills a busy table in batches. Each run of it is a transaction: it examines the
  next rows behind the position `$1`, at first 0, and returns the position of the last of them, or
  NULL at the end. The next run after a crash begins at 0, so the statement must be repeatable.
"""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import asyncpg

from penstock.contracts.files import schemas_folder
from penstock.core.migration_steps import Step, due
from penstock.errors import CannotStart
from penstock.postgres.connection import close, connect, translated
from penstock.postgres.queries import query

log = logging.getLogger(__name__)

# The time of a migration grows with its table, so the limit is generous.
_TIMEOUT_S = 24 * 3600.0
_RETRY_S = 1.0
_LOCK_RETRY_S = 0.2
# How long a migration waits for a table lock: all later statements on the table wait behind it.
_LOCK_WAIT = "200ms"
# Such a wait ends with one of these: the time is over, or the server sees a deadlock before.
_HELD_BY_ANOTHER = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)
# Building an index waits for older transactions, and no statement waits behind it.
_NO_LIMIT = "0"

_BASELINE = "0001_baseline"

# The first words of a migration that is run in batches.
IN_BATCHES = "-- In batches"

_INDEX = re.compile(
    r"(?:CREATE (?:UNIQUE )?INDEX CONCURRENTLY IF NOT EXISTS|(?P<drop>DROP) INDEX CONCURRENTLY IF EXISTS)"
    r" (?:penstock\.)?(?P<index>\w+)[^;]*;?"
)


async def lock(connection: Any) -> None:
    """Waits until no other session migrates or changes roles; the lock ends with the session."""
    while not await connection.fetchval(query("migrations.try_lock")):  # noqa: ASYNC110 (the other session is in another process)
        await asyncio.sleep(_LOCK_RETRY_S)


async def _apply(connection: Any, name: str, text: str) -> bool:
    """Applies one migration; returns False when another session locks one of its tables."""
    statement = re.sub(r"^\s*--.*$", "", text, flags=re.MULTILINE).strip()
    if text.startswith(IN_BATCHES):
        return await _apply_in_batches(connection, name, statement)
    if "CONCURRENTLY" in statement:
        return await _apply_concurrently(connection, name, statement)
    try:
        async with connection.transaction():
            await connection.execute(text, timeout=_TIMEOUT_S)
            await connection.execute(query("migrations.mark"), name)
    except _HELD_BY_ANOTHER:
        return False
    return True


async def _apply_in_batches(connection: Any, name: str, statement: str) -> bool:
    """Runs a statement until it finds no further rows; returns True."""
    behind: int | None = 0
    while behind is not None:
        try:
            behind = await connection.fetchval(statement, behind, timeout=_TIMEOUT_S)
        except _HELD_BY_ANOTHER:
            # Not from the beginning: another session may hold one of many rows for hours.
            await _wait(name)
    await connection.execute(query("migrations.mark"), name)
    return True


async def _wait(name: str) -> None:
    """Waits for another session before the next attempt."""
    log.info(
        "A migration waits for another session that locks its tables, such as a backup",
        extra={"event": "migration_blocked", "migration": name},
    )
    await asyncio.sleep(_RETRY_S)


async def _apply_concurrently(connection: Any, name: str, statement: str) -> bool:
    """Creates or drops an index; returns False when it is not complete.

    Raises:
        CannotStart: the migration has more than one statement, or another one.
    """
    found = _INDEX.fullmatch(statement)
    if found is None:
        raise CannotStart(
            f"the migration {name} must be one CREATE INDEX CONCURRENTLY IF NOT EXISTS, "
            "or one DROP INDEX CONCURRENTLY IF EXISTS"
        )
    index, dropped = found["index"], found["drop"] is not None
    await connection.execute(query("migrations.limit_lock_wait"), _NO_LIMIT)
    try:
        if not dropped and await connection.fetchval(query("migrations.index_is_valid"), index) is False:
            await connection.execute(query("migrations.drop_index").format(index=index), timeout=_TIMEOUT_S)
        await connection.execute(statement, timeout=_TIMEOUT_S)
    except asyncpg.DeadlockDetectedError:
        return False
    finally:
        if not connection.is_closed():
            await connection.execute(query("migrations.limit_lock_wait"), _LOCK_WAIT)
    # A repetition after a deadlock finds the invalid index, and does nothing.
    if await connection.fetchval(query("migrations.index_is_valid"), index) is (None if dropped else True):
        await connection.execute(query("migrations.mark"), name)
        return True
    return False


async def migrate(dsn: str, step: Step | None = None, *, folder: Path | None = None) -> list[str]:
    """Migrates the schema `penstock` of a database and returns the names of the applied migrations.

    A transaction commits together with its row in `migration`. A migration gives up a table lock
    that it does not get at once, and tries again.

    Args:
        dsn: connection URL of a session (not of a pooler).
        step: the step of a rolling upgrade; None is both.
        folder: the folder of the migrations; None is that of this version.

    Raises:
        PostgresUnavailable: no server answers.
        CannotStart: another step must run first, or the database is older than the baseline.
    """
    folder = folder or schemas_folder() / "postgres" / "migrations"
    connection = await connect(dsn, "migrate")
    try:
        with translated():
            # Two processes must not migrate at once.
            await lock(connection)
            await connection.execute(query("migrations.limit_lock_wait"), _LOCK_WAIT)
            await connection.execute(query("migrations.prepare"))
            done = {row["name"] for row in await connection.fetch(query("migrations.applied"))}
            if done and _BASELINE not in done and (folder / f"{_BASELINE}.sql").exists():
                raise CannotStart(
                    "this database is of a version before 0.1.0, which has no upgrade: name an empty database "
                    "(`penstock up --fresh` makes one)"
                )
            applied = []
            for name in due(sorted(file.stem for file in folder.glob("*.sql")), done, step):
                while not await _apply(
                    connection, name, (folder / f"{name}.sql").read_text(encoding="utf-8")
                ):
                    await _wait(name)
                applied.append(name)
            return applied
    finally:
        await close(connection)
