"""Migrations are numbered, can be replayed, and produce schemas/postgres/schema.sql."""

import asyncio
import os
import re
import subprocess

import asyncpg
import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import ContentType
from penstock.contracts.files import schemas_folder
from penstock.core.migration_steps import Step, due
from penstock.core.task import FINAL, State
from penstock.errors import CannotStart
from penstock.local.database import server_binaries
from penstock.postgres import migrations
from penstock.postgres.migrations import migrate

FOLDER = schemas_folder() / "postgres"


def dump(dsn: str) -> str:
    """Returns the schema as pg_dump writes it, without lines that differ from run to run."""
    pg_dump = server_binaries() / "pg_dump"
    text = subprocess.run(
        [pg_dump, "--schema-only", "--no-owner", "--schema=penstock", dsn],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [
        line for line in text.splitlines() if not re.match(r"--|\\(un)?restrict|SET |SELECT pg_catalog", line)
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


async def test_migrations_replayed_equal_the_schema_file(empty_database):
    """The migrations produce schema.sql; PENSTOCK_WRITE_SCHEMA=1 rewrites that file."""
    await migrate(empty_database)
    found = await asyncio.to_thread(dump, empty_database)
    file = FOLDER / "schema.sql"
    if os.environ.get("PENSTOCK_WRITE_SCHEMA"):
        file.write_text(found)
    assert found == file.read_text()


async def test_migrating_again_does_nothing(empty_database):
    """A second run applies no migration, and two concurrent runs apply each migration once."""
    names = sorted(path.stem for path in (FOLDER / "migrations").glob("*.sql"))
    first, second = await asyncio.gather(migrate(empty_database), migrate(empty_database))
    assert sorted(first + second) == names
    assert await migrate(empty_database) == []


def test_migrations_are_numbered_without_gaps():
    """The names of migrations carry their order, without gaps."""
    names = sorted(path.name for path in (FOLDER / "migrations").glob("*.sql"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


def test_no_migration_of_this_release_follows_a_step_post():
    """O6: the step `pre` of the upgrade from the oldest supported release can run first."""
    names = sorted(path.name.removesuffix(".sql") for path in (FOLDER / "migrations").glob("*.sql"))
    done = names[: names.index("0001_baseline") + 1]
    assert due(names, done, Step.PRE) == [name for name in names if name not in done and ".post" not in name]


async def test_the_schema_lists_the_states_of_the_transition_table(database):
    """The CHECK on task.state lists exactly the states of core.task."""
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
async def test_the_schema_lists_the_content_types(database, column):
    """The CHECK lists exactly the content types. PostgreSQL rejects an unreadable row, which would
    otherwise stop every release."""
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


def test_the_cancel_statement_names_all_final_states():
    """The fence in the SQL of `cancel` names exactly the final states of core.task."""
    text = (FOLDER / "queries" / "tasks.sql").read_text()
    cancel = text[text.index("-- name: cancel") :]
    listed = re.search(r"state NOT IN \(([^)]*)\)", cancel)
    assert listed is not None
    assert set(re.findall(r"'(\w+)'", listed.group(1))) == {state.value for state in FINAL}


async def test_a_database_from_before_the_baseline_is_refused(empty_database, tmp_path):
    """O6, O8: such a database has no upgrade, and the error says what to do."""
    (tmp_path / "0001_tasks.sql").write_text("CREATE TABLE penstock.task (id bigint)")
    await migrate(empty_database, folder=tmp_path)
    with pytest.raises(CannotStart, match=r"before 0\.1\.0.*--fresh"):
        await migrate(empty_database)


async def test_a_waiting_migration_does_not_block_its_table(empty_database, tmp_path, monkeypatch):
    """O6: a migration that waits for a long reader lets later statements on the table run."""
    monkeypatch.setattr(migrations, "_RETRY_S", 0.1)
    (tmp_path / "0001_first.sql").write_text("CREATE TABLE penstock.thing (a int)")
    await migrate(empty_database, folder=tmp_path)
    (tmp_path / "0002_second.sql").write_text("ALTER TABLE penstock.thing ADD COLUMN b int")
    reader, other = await asyncpg.connect(empty_database), await asyncpg.connect(empty_database)
    long_read = reader.transaction()
    await long_read.start()
    await reader.fetch("SELECT * FROM penstock.thing")
    migrating = asyncio.ensure_future(migrate(empty_database, folder=tmp_path))
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'penstock.thing'::regclass"
    waits += " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    await wait_until(lambda: fetched(other, waits, 1))
    # The migration leaves the lock queue after its timeout, so that this statement can run.
    await other.execute("INSERT INTO penstock.thing (a) VALUES (1)")
    assert not migrating.done()
    await long_read.rollback()
    assert await migrating == ["0002_second"]
    for connection in (reader, other):
        await connection.close()


async def fetched(connection, statement: str, value: int) -> bool:
    return await connection.fetchval(statement) == value
