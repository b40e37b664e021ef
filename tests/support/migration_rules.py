"""What a migration may do to the tables that have traffic."""

from __future__ import annotations

from typing import Any

# Tables with traffic that may be large.
BUSY = ("task", "callback", "attempt")
# Rows of one of them that a transaction of a migration may read or write.
BATCH = 1_000

_FILES = "SELECT relname, relfilenode FROM pg_class WHERE oid = ANY ($1::regclass[])"
_ROWS = (
    "SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) + n_tup_ins + n_tup_upd + n_tup_del AS rows "
    "FROM pg_stat_xact_user_tables WHERE relid = ANY ($1::regclass[])"
)


async def violations(connection: Any, text: str) -> list[str]:
    """Applies a migration that is a transaction; returns why it would stop a service for long.

    A lock that stops writes is taken for a moment only if the transaction examines no row of the
    table: it builds no index, validates no constraint, writes no new file and fills no column.

    Args:
        connection: of a database whose busy tables have more than `BATCH` rows.
        text: of the migration.
    """
    tables = [f"penstock.{name}" for name in BUSY]
    before = {row["relname"]: row["relfilenode"] for row in await connection.fetch(_FILES, tables)}
    async with connection.transaction():
        await connection.execute(text)
        rows = {row["relname"]: row["rows"] for row in await connection.fetch(_ROWS, tables)}
        after = {row["relname"]: row["relfilenode"] for row in await connection.fetch(_FILES, tables)}
    return [
        *(f"it reads or writes {count:,} rows of {table}" for table, count in rows.items() if count > BATCH),
        *(f"it writes {table} anew" for table, file in before.items() if after.get(table) != file),
    ]


async def batch_violations(connection: Any, statement: str) -> list[str]:
    """Runs a migration in batches; returns why one of them would stop a service for long.

    Args:
        connection: of `penstock.postgres.connection.connect`, as the migration has one. Its
            database has busy tables with more than `BATCH` rows.
        statement: of the migration.
    """
    tables = [f"penstock.{name}" for name in BUSY]
    most: dict[str, int] = {}
    behind: int | None = 0
    while behind is not None:
        async with connection.transaction():
            # The plan for a table that is large.
            await connection.execute("SET LOCAL enable_seqscan = off")
            # The server counts those of earlier transactions until it has published them.
            before = {row["relname"]: row["rows"] for row in await connection.fetch(_ROWS, tables)}
            behind = await connection.fetchval(statement, behind)
            for row in await connection.fetch(_ROWS, tables):
                rows = row["rows"] - before.get(row["relname"], 0)
                most[row["relname"]] = max(rows, most.get(row["relname"], 0))
    return [
        f"a batch reads or writes {count:,} rows of {table}" for table, count in most.items() if count > BATCH
    ]


async def fill(connection: Any, rows: int) -> None:
    """Fills the busy tables with this many rows each."""
    await connection.execute(
        "INSERT INTO penstock.task_type (name) VALUES ('t') ON CONFLICT DO NOTHING;"
        "INSERT INTO penstock.task (type, state, stage, content_type, context) "
        f"SELECT 't', 'ready', 's', 'json', '1' FROM generate_series(1, {rows});"
        "INSERT INTO penstock.attempt (task_id, step, attempt, stage, outcome, finished_at) "
        "SELECT id, 0, 0, 's', 'next', now() FROM penstock.task;"
        "INSERT INTO penstock.callback (id, namespace, target, task_id, state, body, due_at) "
        "SELECT 'cb-' || id, 'default', 'http://a/', id, 'pending', '', now() FROM penstock.task;"
        "ANALYZE penstock.task, penstock.attempt, penstock.callback;"
    )
