"""Migrations beside traffic: what they lock, how long, and what a crash leaves."""

import asyncio
import shutil
import time

import asyncpg
import pytest
from tests.support.migration_rules import BATCH, batch_violations, fill, violations
from tests.support.waiting import in_time, wait_until

from penstock.contracts.files import schemas_folder
from penstock.errors import CannotStart
from penstock.postgres import migrations
from penstock.postgres.connection import connect
from penstock.postgres.migrations import IN_BATCHES, migrate

FOLDER = schemas_folder() / "postgres" / "migrations"
FILES = sorted(FOLDER.glob("*.sql"))
# The migrations after this one keep the rule.
RELEASED = "0001_baseline"
# A migration that waits for older transactions.
INDEX = "0002_made_up"
INDEX_TEXT = "CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS made_up ON penstock.task (id, step)"
# A migration that fills a column of a busy table.
BACKFILL = "0003_backfill"
BACKFILL_TEXT = """-- In batches: fills `label_count`.
WITH batch AS (
    SELECT id FROM penstock.task WHERE id > $1 ORDER BY id LIMIT 200 FOR NO KEY UPDATE
), filled AS (
    UPDATE penstock.task SET label_count = 0 WHERE id = ANY (ARRAY(SELECT id FROM batch)) AND label_count IS NULL
)
SELECT max(id) FROM batch;
"""
COLUMN_TEXT = "ALTER TABLE penstock.task ADD COLUMN label_count integer"
ROWS = 5 * BATCH


@pytest.fixture
async def released(empty_database, tmp_path):
    """The folder of the released migrations, which the database has; its tables have rows."""
    shutil.copy(FOLDER / f"{RELEASED}.sql", tmp_path)
    await migrate(empty_database, folder=tmp_path)
    connection = await asyncpg.connect(empty_database)
    await fill(connection, ROWS)
    yield tmp_path
    await connection.close()


@pytest.fixture
async def db(empty_database, released):
    connection = await asyncpg.connect(empty_database)
    yield connection
    await connection.close()


@pytest.fixture
async def session(empty_database, released):
    """A session as a migration has it."""
    connection = await connect(empty_database, "test")
    yield connection
    await connection.close()


async def test_no_migration_stops_a_busy_table_for_long(empty_database, released, db, session):
    """O6: no transaction of a migration examines the rows of tasks, callbacks or attempts, for
    which their writers would wait. A migration creates one index of these, concurrently."""
    found = {}
    for file in FILES:
        if file.stem > RELEASED:
            text = file.read_text()
            if "CONCURRENTLY" in text:
                shutil.copy(file, released)
                assert await migrate(empty_database, folder=released) == [file.stem]
            elif text.startswith(IN_BATCHES):
                if broken := await batch_violations(session, text):
                    found[file.name] = broken
            elif broken := await violations(db, text):
                found[file.name] = broken
            else:
                await db.execute("INSERT INTO penstock.migration (name) VALUES ($1)", file.stem)
                shutil.copy(file, released)
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "CREATE INDEX slow ON penstock.task (stage)",
        "CREATE UNIQUE INDEX slow ON penstock.callback (id, state)",
        "UPDATE penstock.task SET labels = '{}'",
        "DO $$ BEGIN UPDATE penstock.attempt SET worker = 'w'; END $$",
        "ALTER TABLE penstock.task ADD COLUMN slow double precision DEFAULT random()",
        "ALTER TABLE penstock.task ALTER COLUMN attempt TYPE bigint",
        "ALTER TABLE penstock.task ALTER COLUMN updated_at SET NOT NULL, ADD CONSTRAINT slow CHECK (step >= 0)",
        "ALTER TABLE penstock.attempt ADD CONSTRAINT slow FOREIGN KEY (task_id) REFERENCES penstock.task (id)",
        "CREATE TABLE penstock.slow AS SELECT id FROM penstock.task",
    ],
)
async def test_a_migration_that_breaks_the_rule_is_found(db, text):
    """O6: the test above fails for a new migration that would stop services."""
    assert await violations(db, text) != []


@pytest.mark.parametrize(
    "text",
    [
        "ALTER TABLE penstock.task ADD COLUMN quick bigint, ADD COLUMN other text DEFAULT 'x' NOT NULL",
        "ALTER TABLE penstock.task ADD CONSTRAINT quick CHECK (step >= 0) NOT VALID",
        "CREATE TABLE penstock.quick (a int); CREATE INDEX quick_a ON penstock.quick (a)",
    ],
)
async def test_a_migration_of_a_moment_is_permitted(db, text):
    """O6: a lock that is held for a moment stops nobody for long."""
    assert await violations(db, text) == []


async def test_batches_that_break_the_rule_are_found(db, session):
    """O6: a batch that examines a whole table is found, also where only its plan does."""
    await db.execute(COLUMN_TEXT)
    assert await batch_violations(session, BACKFILL_TEXT) == []
    joined = BACKFILL_TEXT.replace(
        "WHERE id = ANY (ARRAY(SELECT id FROM batch)) AND", "FROM batch WHERE task.id = batch.id AND"
    )
    for text in (joined, BACKFILL_TEXT.replace("LIMIT 200", "LIMIT 3000")):
        assert await batch_violations(session, text) != []


async def test_a_backfill_commits_in_batches_and_waits_for_a_row(empty_database, released, db):
    """O1, O6: a row that another session has locked delays the migration only. What it has filled
    stays, and other sessions write rows before and behind that one. A run that is ended is
    repeated, and then completes."""
    (released / "0002_column.sql").write_text(COLUMN_TEXT)
    await migrate(empty_database, folder=released)
    (released / f"{BACKFILL}.sql").write_text(BACKFILL_TEXT)
    other = await asyncpg.connect(empty_database)
    filled = "SELECT count(*) FROM penstock.task WHERE label_count = 0"
    for is_ended in (True, False):
        transaction = other.transaction()
        await transaction.start()
        # In a subquery, because the lock would include the rows before.
        locked = await other.fetchval(
            "SELECT id FROM penstock.task "
            "WHERE id = (SELECT id FROM penstock.task ORDER BY id OFFSET 2000 LIMIT 1) FOR UPDATE"
        )
        migrating = asyncio.ensure_future(migrate(empty_database, folder=released))
        await wait_until(lambda: db.fetchval(f"SELECT ({filled}) = 2000"))
        for task_id in (locked - 1500, locked - 1, locked + 1, locked + 1500):
            await in_time(db.execute("UPDATE penstock.task SET step = step WHERE id = $1", task_id))
        assert not migrating.done()
        if is_ended:
            migrating.cancel()
            await asyncio.gather(migrating, return_exceptions=True)
        await transaction.rollback()
    assert await in_time(migrating) == [BACKFILL]
    assert await db.fetchval(filled) == ROWS
    assert await migrate(empty_database, folder=released) == []
    await other.close()


async def test_traffic_goes_on_while_an_index_waits_for_a_transaction(empty_database, released):
    """O6: a transaction that stays open delays the migration, and neither delays the other
    sessions, which write and lock rows meanwhile."""
    (released / f"{INDEX}.sql").write_text(INDEX_TEXT)
    open_session, other = [await asyncpg.connect(empty_database) for _ in range(2)]
    transaction = open_session.transaction(isolation="repeatable_read")
    await transaction.start()
    await open_session.execute("UPDATE penstock.attempt SET worker = 'w' WHERE task_id < 0")
    migrating = asyncio.ensure_future(migrate(empty_database, folder=released))
    waits = (
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() "
        "AND query LIKE '%CREATE%CONCURRENTLY%' AND wait_event = 'virtualxid'"
    )
    try:
        await wait_until(lambda: other.fetchval(waits))
        for _ in range(50):
            await in_time(
                other.execute(
                    "UPDATE penstock.task SET step = step WHERE id = (SELECT min(id) FROM penstock.task)"
                )
            )
            await in_time(insert_one(other))
        assert not migrating.done()
    finally:
        await transaction.rollback()
    assert await in_time(migrating) == [INDEX]
    for connection in (open_session, other):
        await connection.close()


async def insert_one(connection):
    await connection.execute(
        "INSERT INTO penstock.task (type, state, stage, content_type, context) VALUES ('t', 'ready', 's', 'json', '1')"
    )


async def test_an_index_that_a_crash_left_is_built_again(empty_database, released, db):
    """O1, O6: a migration that is ended while it builds an index leaves it invalid. The next run
    completes it, and applies nothing twice."""
    (released / f"{INDEX}.sql").write_text(INDEX_TEXT)
    blocker = await asyncpg.connect(empty_database)
    transaction = blocker.transaction(isolation="repeatable_read")
    await transaction.start()
    await blocker.execute("UPDATE penstock.attempt SET worker = 'w' WHERE task_id < 0")
    for _ in range(2):
        migrating = asyncio.ensure_future(migrate(empty_database, folder=released))
        found = (
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND query LIKE '%CREATE%CONCURRENTLY%' AND wait_event = 'virtualxid'"
        )
        pid = await wait_until(lambda found=found: db.fetchval(found))
        await db.execute("SELECT pg_terminate_backend($1)", pid)
        with pytest.raises(Exception):  # noqa: B017, PT011 (the driver has several errors for a lost session)
            await in_time(migrating)
    invalid = "SELECT array_agg(indexrelid::regclass::text) FROM pg_index WHERE NOT indisvalid"
    assert await db.fetchval(invalid) == ["penstock.made_up"]
    await transaction.rollback()
    assert await migrate(empty_database, folder=released) == [INDEX]
    assert await db.fetchval(invalid) is None
    assert await db.fetchval(
        "SELECT indisunique FROM pg_index WHERE indexrelid = 'penstock.made_up'::regclass"
    )
    assert await migrate(empty_database, folder=released) == []
    await blocker.close()


async def test_an_index_is_alone_in_its_migration(empty_database, tmp_path):
    """O6: a second statement could run without the first, so the migration is refused."""
    (tmp_path / "0001_first.sql").write_text("CREATE TABLE penstock.thing (a int)")
    (tmp_path / "0002_second.sql").write_text(
        "CREATE INDEX CONCURRENTLY IF NOT EXISTS b ON penstock.thing (a); SELECT 1"
    )
    with pytest.raises(CannotStart, match="0002_second"):
        await migrate(empty_database, folder=tmp_path)
    (tmp_path / "0002_second.sql").write_text(
        "CREATE INDEX CONCURRENTLY IF NOT EXISTS b ON penstock.thing (a)"
    )
    (tmp_path / "0003_third.sql").write_text("-- Drops it.\nDROP INDEX CONCURRENTLY IF EXISTS penstock.b;\n")
    assert await migrate(empty_database, folder=tmp_path) == ["0002_second", "0003_third"]


async def test_a_lock_that_is_not_free_is_given_up_at_once(empty_database, tmp_path, monkeypatch):
    """O6: while a migration waits for a table, a statement on the table waits for a fraction of a
    second at most."""
    monkeypatch.setattr(migrations, "_RETRY_S", 0.5)
    (tmp_path / "0001_first.sql").write_text("CREATE TABLE penstock.thing (a int)")
    await migrate(empty_database, folder=tmp_path)
    (tmp_path / "0002_second.sql").write_text("ALTER TABLE penstock.thing ADD COLUMN b int")
    reader, other = [await asyncpg.connect(empty_database) for _ in range(2)]
    async with reader.transaction():
        await reader.fetch("SELECT * FROM penstock.thing")
        migrating = asyncio.ensure_future(migrate(empty_database, folder=tmp_path))
        # The server ends a statement that waits for longer.
        await other.execute("SET statement_timeout = '1s'")
        end_s = time.monotonic() + 2
        while time.monotonic() < end_s:
            await other.execute("INSERT INTO penstock.thing (a) VALUES (1)")
        assert not migrating.done()
    assert await in_time(migrating) == ["0002_second"]
    for connection in (reader, other):
        await connection.close()
