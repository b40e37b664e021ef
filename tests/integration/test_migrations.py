"""Migrations: numbered, replayable, and equal to schemas/postgres/schema.sql."""

import asyncio
import os
import re
import subprocess

import asyncpg
import pytest
from tests.waiting import wait_until

from penstock.contracts.context import ContentType
from penstock.contracts.files import schemas_folder
from penstock.core.task import FINAL, State
from penstock.local.database import server_binaries
from penstock.postgres import migrations
from penstock.postgres.migrations import migrate

FOLDER = schemas_folder() / "postgres"


def dump(dsn: str) -> str:
    """The schema as pg_dump writes it, without what changes from run to run."""
    pg_dump = server_binaries() / "pg_dump"
    text = subprocess.run(
        [pg_dump, "--schema-only", "--no-owner", "--no-privileges", "--schema=penstock", dsn],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [
        line for line in text.splitlines() if not re.match(r"--|\\(un)?restrict|SET |SELECT pg_catalog", line)
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


async def test_migrations_replayed_equal_the_schema_file(empty_database):
    """Contracts: schema.sql is what the migrations make; PENSTOCK_WRITE_SCHEMA=1 renews it."""
    await migrate(empty_database)
    found = await asyncio.to_thread(dump, empty_database)
    file = FOLDER / "schema.sql"
    if os.environ.get("PENSTOCK_WRITE_SCHEMA"):
        file.write_text(found)
    assert found == file.read_text()


async def test_migrating_again_does_nothing(empty_database):
    """A second run applies nothing, and two at once apply each migration once."""
    names = sorted(path.stem for path in (FOLDER / "migrations").glob("*.sql"))
    first, second = await asyncio.gather(migrate(empty_database), migrate(empty_database))
    assert sorted(first + second) == names
    assert await migrate(empty_database) == []


def test_migrations_are_numbered_without_gaps():
    """Order is in the name."""
    names = sorted(path.name for path in (FOLDER / "migrations").glob("*.sql"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


async def test_the_schema_knows_the_states_of_the_transition_table(database):
    """One word for one thing: the CHECK on task.state lists exactly the states of core.task."""
    connection = await asyncpg.connect(database)
    try:
        rows = await connection.fetch(
            "SELECT pg_get_constraintdef(oid) AS text FROM pg_constraint WHERE conrelid = 'penstock.task'::regclass"
        )
    finally:
        await connection.close()
    text = next(row["text"] for row in rows if "'scheduled'" in row["text"] and "'ready'" in row["text"])
    assert set(re.findall(r"'(\w+)'", text)) == {state.value for state in State}


@pytest.mark.parametrize("column", ["content_type", "result_type"])
async def test_the_schema_knows_the_content_types(database, column):
    """One word for one thing; and a row that nobody could read, which would stop the release of every type, is refused
    where it is written."""
    connection = await asyncpg.connect(database)
    try:
        text = await connection.fetchval(
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = $1", f"task_{column}_check"
        )
        assert set(re.findall(r"'(\w+)'", text)) == {kind.value for kind in ContentType}
        await connection.execute("INSERT INTO penstock.task_type (name) VALUES ('t')")
        row = {"content_type": "json", "result_type": "json"} | {column: "application/json"}
        with pytest.raises(asyncpg.CheckViolationError, match=f"task_{column}_check"):
            await connection.execute(
                "INSERT INTO penstock.task (type, state, stage, content_type, result_type, context)"
                " VALUES ('t', 'ready', 's', $1, $2, 'null')",
                row["content_type"],
                row["result_type"],
            )
    finally:
        await connection.close()


def test_statements_that_spare_final_tasks_name_all_final_states():
    """The fences in SQL and the table in core say the same."""
    text = (FOLDER / "queries" / "tasks.sql").read_text()
    cancel = text[text.index("-- name: cancel") :]
    listed = re.search(r"state NOT IN \(([^)]*)\)", cancel)
    assert listed is not None
    assert set(re.findall(r"'(\w+)'", listed.group(1))) == {state.value for state in FINAL}


async def test_a_migration_lets_others_pass_while_its_table_is_in_use(empty_database, tmp_path, monkeypatch):
    """O6: while somebody reads a table at length, a migration of it waits without holding up those who come after it."""
    monkeypatch.setattr(migrations, "_AGAIN_S", 0.1)
    (tmp_path / "0001_first.sql").write_text("CREATE TABLE penstock.thing (a int)")
    await migrate(empty_database, folder=tmp_path)
    (tmp_path / "0002_second.sql").write_text("ALTER TABLE penstock.thing ADD COLUMN b int")
    backup, other = await asyncpg.connect(empty_database), await asyncpg.connect(empty_database)
    reading = backup.transaction()
    await reading.start()
    await backup.fetch("SELECT * FROM penstock.thing")
    migrating = asyncio.ensure_future(migrate(empty_database, folder=tmp_path))
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'penstock.thing'::regclass"
    await wait_until(lambda: fetched(other, waits, 1))
    # It gives up its place in the queue, and this comes through.
    await other.execute("INSERT INTO penstock.thing (a) VALUES (1)")
    assert not migrating.done()
    await reading.rollback()
    assert await migrating == ["0002_second"]
    for connection in (backup, other):
        await connection.close()


async def fetched(connection, statement: str, value: int) -> bool:
    return await connection.fetchval(statement) == value
