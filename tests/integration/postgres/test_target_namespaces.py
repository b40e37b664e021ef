"""Migrations 0022 and 0023 give targets namespaces: stored data survives.

Old and new services no longer run between them: an older deployment is upgraded to the oldest
supported revision first (`tests/acceptance/test_upgrade.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import pytest

from penstock.contracts.files import schemas_folder
from penstock.core.access import namespace_of
from penstock.core.migration_steps import Step
from penstock.postgres import targets
from penstock.postgres.migrations import migrate

FOLDER = schemas_folder() / "postgres" / "migrations"
# The last migration of the release before, and of the release with these migrations.
BEFORE, LAST = 21, 24

# Statements of the previous version, copied unchanged.
TAKE_OWNERSHIP = "INSERT INTO target AS t (url, owner) VALUES ($1, $2) ON CONFLICT (url) DO UPDATE SET owner = excluded.owner"
SAVE_SNAPSHOT = (
    "UPDATE target SET state = CASE WHEN state = 'disabled' THEN state ELSE $3 END, count = $4, slow_at = now(), "
    'called_at = now(), failures = 1, attempts = \'[{"callback": "msg_1"}]\' WHERE url = $1 AND owner = $2'
)
DISABLE = (
    "WITH changed AS (INSERT INTO target AS t (url, state, why) VALUES ($1, 'disabled', $2) "
    "ON CONFLICT (url) DO UPDATE SET state = 'disabled', why = excluded.why, owner = NULL, changed_at = now() "
    "WHERE t.state <> 'disabled' RETURNING url) SELECT url, pg_notify('penstock_targets', url) FROM changed"
)
LIMIT = (
    "INSERT INTO target AS t (url, rate) VALUES ($1, $2) "
    "ON CONFLICT (url) DO UPDATE SET rate = excluded.rate, owner = NULL"
)
INSERT_CALLBACK = "INSERT INTO callback (id, target, task_id, body, due_at) VALUES ($1, $2, $3, '{}', now())"


async def upgrade(dsn: str, step: Step | None, last: int = LAST) -> list[str]:
    """Applies the migrations up to number `last`: later releases require both steps of this one."""
    with TemporaryDirectory() as folder:
        for file in sorted(FOLDER.glob("*.sql"))[:last]:
            shutil.copy(file, folder)
        applied = await migrate(dsn, step, folder=Path(folder))
    # The statements of this release, which stand for new code, need a column of migration 0052.
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            "ALTER TABLE IF EXISTS penstock.callback_target ADD COLUMN IF NOT EXISTS gone_at timestamptz"
        )
    finally:
        await connection.close()
    return applied


@pytest.fixture
async def old(empty_database: str) -> AsyncIterator[Any]:
    """Creates a database of the previous version, and connects to it."""
    await upgrade(empty_database, None, BEFORE)
    connection = await asyncpg.connect(empty_database, server_settings={"search_path": "penstock"})
    yield connection
    await connection.close()


async def task(connection: Any, type_name: str) -> int:
    await connection.execute("INSERT INTO task_type (name) VALUES ($1) ON CONFLICT DO NOTHING", type_name)
    task_id: int = await connection.fetchval(
        "INSERT INTO task (type, state, stage, content_type, context) VALUES ($1, 'ready', 's', 'json', 'null') RETURNING id",
        type_name,
    )
    return task_id


async def states(connection: Any, url: str) -> dict[str, str]:
    rows = await connection.fetch("SELECT namespace, state FROM callback_target WHERE url = $1", url)
    return {row["namespace"]: row["state"] for row in rows}


async def test_the_state_of_an_address_is_copied_to_every_namespace(old: Any, empty_database: str) -> None:
    """O5, O9: after the first step an address that was disabled, limited or slow is so in each
    namespace. No namespace sees another's calls, and each callback has the namespace of its
    task."""
    tasks = {name: await task(old, name) for name in ("order", "acme--order", "beta--a--b", "--odd")}
    for number, task_id in enumerate(tasks.values()):
        await old.execute(INSERT_CALLBACK, f"cb{number}", "http://gone/", task_id)
    await old.execute(INSERT_CALLBACK, "orphan", "http://gone/", 999)
    await old.execute(DISABLE, "http://gone/", "410")
    await old.execute(LIMIT, "http://limited/", 5.0)
    for url, state, count in (("http://slow/", "abnormal", 12), ("http://quiet/", "normal", 0)):
        await old.execute(TAKE_OWNERSHIP, url, "old")
        await old.execute(SAVE_SNAPSHOT, url, "old", state, count)
    assert await upgrade(empty_database, Step.PRE) == ["0022_target_namespaces", "0023_callback_namespaces"]
    all_namespaces = ("acme", "beta", "default")
    assert await states(old, "http://gone/") == dict.fromkeys(all_namespaces, "disabled")
    assert await states(old, "http://slow/") == dict.fromkeys(all_namespaces, "abnormal")
    assert await states(old, "http://limited/") == dict.fromkeys(all_namespaces, "normal")
    assert await states(old, "http://quiet/") == {}
    assert {row["rate"] for row in await targets.get(old, "http://limited/")} == {5.0}
    assert {(row["count"], row["attempts"]) for row in await targets.get(old, "http://slow/")} == {(12, "[]")}
    rows = await old.fetch("SELECT id, namespace FROM callback")
    assert {row["id"]: row["namespace"] for row in rows} == {
        "cb0": "default",
        "cb1": "acme",
        "cb2": "beta",
        "cb3": "default",
        "orphan": "default",
    }
    for name in ("", "a", "--", "--a", "a--", "a--b--c", "a---b", "a-b", "a-b--c", "-a--b", "a_--b"):
        assert await old.fetchval("SELECT penstock.namespace_of($1)", name) == namespace_of(name)


async def test_a_database_without_namespaces_keeps_its_targets(old: Any, empty_database: str) -> None:
    """O9: with types of one namespace only, the migration keeps rows and their latest calls
    unchanged."""
    await task(old, "order")
    await old.execute(TAKE_OWNERSHIP, "http://quiet/", "old")
    await old.execute(SAVE_SNAPSHOT, "http://quiet/", "old", "normal", 0)
    columns = "url, state, why, count, slow_at, called_at, failures, rate, attempts, changed_at"
    before = await old.fetch(f"SELECT {columns} FROM target")
    await upgrade(empty_database, Step.PRE)
    assert await old.fetch(f"SELECT {columns} FROM callback_target") == before
    assert await states(old, "http://quiet/") == {"default": "normal"}
