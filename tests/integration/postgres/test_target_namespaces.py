"""Migrations 0022 to 0024 give targets namespaces while services run: stored data survives, and old
and new code exchange changes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import pytest
from tests.support.waiting import wait_until

from penstock.contracts.files import schemas_folder
from penstock.core.access import namespace_of
from penstock.core.health import HealthSnapshot
from penstock.core.migration_steps import Step
from penstock.core.target import TargetId
from penstock.postgres import targets
from penstock.postgres.migrations import migrate
from penstock.postgres.targets import CHANNEL, StoredTarget

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
ENABLE = (
    "WITH changed AS (UPDATE target SET state = 'normal', why = NULL, count = 0, slow_at = NULL, failures = 0, "
    "owner = NULL, changed_at = now() WHERE url = $1 AND state <> 'normal' RETURNING url) "
    "SELECT url, pg_notify('penstock_targets', url) FROM changed"
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


async def rates(connection: Any, url: str) -> dict[str, float | None]:
    return {row["namespace"]: row["rate"] for row in await targets.get(connection, url)}


async def namespaces(connection: Any) -> list[str]:
    return [row[0] for row in await connection.fetch("SELECT penstock.namespaces()")]


async def old_state(connection: Any, url: str) -> Any:
    return await connection.fetchrow("SELECT state, why, rate, count FROM target WHERE url = $1", url)


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


async def test_old_and_new_code_exchange_changes_between_the_steps(old: Any, empty_database: str) -> None:
    """O5, O9: between the steps old code's changes of an address reach all namespaces, and new
    code's changes of a target reach old code. Each change is notified, and neither side undoes the
    other's. Callbacks of old code get their namespace."""
    acme_task, _beta_task, plain_task = [await task(old, name) for name in ("acme--o", "beta--o", "o")]
    await upgrade(empty_database, Step.PRE)
    notified: list[str] = []
    await old.add_listener(CHANNEL, lambda *arguments: notified.append(arguments[-1]))
    url, all_namespaces = "http://a/", ("acme", "beta", "default")
    acme, beta = TargetId("acme", url), TargetId("beta", url)

    await old.execute(INSERT_CALLBACK, "cb1", url, acme_task)
    await old.execute(INSERT_CALLBACK, "cb2", url, plain_task)
    rows = await old.fetch("SELECT id, namespace FROM callback")
    assert {row["id"]: row["namespace"] for row in rows} == {"cb1": "acme", "cb2": "default"}

    await old.execute(TAKE_OWNERSHIP, url, "old")
    assert await states(old, url) == {}
    await old.execute(SAVE_SNAPSHOT, url, "old", "abnormal", 12)
    assert await states(old, url) == dict.fromkeys(all_namespaces, "abnormal")
    assert notified == []
    # The new owner takes over this count, and stays the owner while old code only counts.
    pool = old
    assert {stored.health.count for stored in await targets.take_over(pool, [acme, beta], "new")} == {12}
    await old.execute(SAVE_SNAPSHOT, url, "old", "abnormal", 13)
    assert await targets.save(
        pool,
        [
            StoredTarget(target=target, health=HealthSnapshot(14, None, None, abnormal=True))
            for target in (acme, beta)
        ],
        "new",
    ) == {acme, beta}

    assert await targets.disable(old, acme, "ours")
    found = await old_state(old, url)
    assert (found["state"], found["why"]) == ("disabled", "ours")
    await wait_until(lambda: {"acme http://a/", "http://a/"} <= set(notified))
    # Old code has read the change and keeps counting: beta stays abnormal, acme disabled.
    await old.execute(TAKE_OWNERSHIP, url, "old")
    await old.execute(SAVE_SNAPSHOT, url, "old", "normal", 3)
    assert await states(old, url) == {"acme": "disabled", "beta": "abnormal", "default": "abnormal"}
    assert await targets.disable(old, beta, "theirs")
    assert await targets.enable(old, acme)
    assert (await old_state(old, url))["state"] == "disabled"
    assert await targets.enable(old, beta)
    found = await old_state(old, url)
    assert (found["state"], found["why"], found["count"]) == ("normal", None, 0)

    notified.clear()
    assert await old.fetch(DISABLE, url, "until noon")
    assert await states(old, url) == dict.fromkeys(all_namespaces, "disabled")
    await wait_until(lambda: {f"{namespace} {url}" for namespace in all_namespaces} <= set(notified))
    assert await targets.save(pool, [StoredTarget(target=acme, health=HealthSnapshot())], "new") == set()
    assert await old.fetch(ENABLE, url)
    assert await states(old, url) == dict.fromkeys(all_namespaces, "normal")

    await targets.limit(old, acme, 2.0)
    await targets.limit(old, beta, 3.0)
    assert (await old_state(old, url))["rate"] == 2.0
    await old.execute(LIMIT, url, 7.0)
    assert {row["rate"] for row in await targets.get(old, url)} == {7.0}
    await targets.limit(old, TargetId("acme", "http://new/"), 2.0)
    assert tuple(await old_state(old, "http://new/")) == ("normal", None, 2.0, 0)
    await old.reset()

    assert await upgrade(empty_database, Step.POST) == ["0024_target_namespaces.post"]
    assert await old.fetchval("SELECT to_regclass('penstock.target')") is None
    triggers_left = "SELECT count(*) FROM pg_trigger WHERE tgrelid IN ('callback'::regclass, 'callback_target'::regclass) AND NOT tgisinternal"
    assert await old.fetchval(triggers_left) == 0
    assert await targets.disable(old, beta, "theirs again")
    assert await states(old, url) == {"acme": "normal", "beta": "disabled", "default": "normal"}


async def test_old_code_copies_no_change_of_new_code_to_other_namespaces(
    old: Any, empty_database: str
) -> None:
    """C2, O9: between the steps old code reads the 410 or rate of one namespace. Its takeovers,
    snapshots and changes of the address copy neither to other namespaces, including later ones."""
    for name in ("acme--o", "beta--o"):
        await task(old, name)
    await upgrade(empty_database, Step.PRE)
    for url, later in (("http://known/", "gamma"), ("http://unknown/", "delta")):
        acme, other_namespaces = TargetId("acme", url), set(await namespaces(old)) - {"acme"}
        if later == "gamma":
            await old.execute(TAKE_OWNERSHIP, url, "old")
        assert await targets.disable(old, acme, "410")
        await targets.limit(old, acme, 2.0)
        assert tuple(await old_state(old, url)) == ("disabled", "410", 2.0, 0)
        await old.execute(TAKE_OWNERSHIP, url, "old")
        assert await states(old, url) == {"acme": "disabled"}
        await old.execute(SAVE_SNAPSHOT, url, "old", "normal", 12)
        assert await states(old, url) == {"acme": "disabled"} | dict.fromkeys(other_namespaces, "normal")
        assert await rates(old, url) == {"acme": 2.0} | dict.fromkeys(other_namespaces)
        await old.execute(LIMIT, url, 2.0)
        assert await states(old, url) == {"acme": "disabled"} | dict.fromkeys(other_namespaces, "normal")
        assert await rates(old, url) == dict.fromkeys({"acme", *other_namespaces}, 2.0)
        await task(old, f"{later}--o")
        await old.execute(TAKE_OWNERSHIP, url, "old")
        await old.execute(SAVE_SNAPSHOT, url, "old", "normal", 13)
        assert await states(old, url) == {"acme": "disabled"} | dict.fromkeys(
            {*other_namespaces, later}, "normal"
        )
        assert (await rates(old, url))[later] is None
        assert await targets.enable(old, acme)
        assert set((await states(old, url)).values()) == {"normal"}
        assert (await old_state(old, url))["state"] == "normal"


async def test_old_snapshots_do_not_repeat_a_change(old: Any, empty_database: str) -> None:
    """C2, O5: a disable by old code copies no rate to new namespaces, and old snapshots heal no
    other namespace after an enable. With one of two disabled, old code reads that one's reason."""
    for name in ("acme--o", "beta--o"):
        await task(old, name)
    await upgrade(empty_database, Step.PRE)
    url = "http://a/"
    acme, beta = TargetId("acme", url), TargetId("beta", url)
    await targets.limit(old, acme, 2.0)
    assert await old.fetch(DISABLE, url, "until noon")
    assert await rates(old, url) == {"acme": 2.0, "beta": None}
    assert {row["why"] for row in await targets.get(old, url)} == {"until noon"}
    assert await old.fetch(ENABLE, url)
    await old.execute(TAKE_OWNERSHIP, url, "old")
    await old.execute(SAVE_SNAPSHOT, url, "old", "abnormal", 12)
    assert await states(old, url) == {"acme": "abnormal", "beta": "abnormal"}

    assert await targets.disable(old, acme, "ours")
    assert await targets.disable(old, beta, "theirs")
    assert await targets.enable(old, acme)
    assert (await old_state(old, url))["why"] == "theirs"
    assert await targets.enable(old, beta)

    await old.execute(TAKE_OWNERSHIP, url, "old")
    await old.execute(SAVE_SNAPSHOT, url, "old", "abnormal", 12)
    assert await targets.disable(old, acme, "ours")
    assert await targets.enable(old, acme)
    assert tuple(await old_state(old, url)) == ("normal", None, 2.0, 0)
    # Old code counts from 0 again; beta stays abnormal until old code finds the address normal.
    await old.execute(TAKE_OWNERSHIP, url, "old")
    await old.execute(SAVE_SNAPSHOT, url, "old", "normal", 1)
    found = {row["namespace"]: (row["state"], row["count"]) for row in await targets.get(old, url)}
    assert found == {"acme": ("normal", 1), "beta": ("abnormal", 12)}
    await old.execute(SAVE_SNAPSHOT, url, "old", "abnormal", 13)
    await old.execute(SAVE_SNAPSHOT, url, "old", "normal", 9)
    found = {row["namespace"]: (row["state"], row["count"]) for row in await targets.get(old, url)}
    assert found == {"acme": ("normal", 9), "beta": ("normal", 9)}


async def test_two_concurrent_enables_leave_the_address_enabled(old: Any, empty_database: str) -> None:
    """O5, O9: between the steps, overlapping transactions that enable two namespaces leave the
    address enabled for old code."""
    for name in ("acme--o", "beta--o"):
        await task(old, name)
    await upgrade(empty_database, Step.PRE)
    url = "http://a/"
    acme, beta = TargetId("acme", url), TargetId("beta", url)
    assert await targets.disable(old, acme, "ours")
    assert await targets.disable(old, beta, "theirs")
    other = await asyncpg.connect(empty_database, server_settings={"search_path": "penstock"})
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = $1"
    try:
        async with old.transaction():
            assert await targets.enable(old, acme)
            second = asyncio.create_task(targets.enable(other, beta))

            async def waiting() -> bool:
                return bool(await old.fetchval(waits, other.get_server_pid()))

            await wait_until(waiting, what="the second transaction waits for the first")
        assert await second
    finally:
        await other.close()
    assert await states(old, url) == {"acme": "normal", "beta": "normal"}
    assert (await old_state(old, url))["state"] == "normal"


async def test_enabling_an_abnormal_target_is_not_undone_by_old_snapshots(
    old: Any, empty_database: str
) -> None:
    """O5, C4: between the steps, new code that enables a target also resets old code's health of
    the address. PostgreSQL rejects the old snapshot, and old code reads the address again."""
    for name in ("acme--o", "beta--o"):
        await task(old, name)
    await upgrade(empty_database, Step.PRE)
    notified: list[str] = []
    await old.add_listener(CHANNEL, lambda *arguments: notified.append(arguments[-1]))
    url = "http://a/"
    await old.execute(TAKE_OWNERSHIP, url, "old")
    await old.execute(SAVE_SNAPSHOT, url, "old", "abnormal", 12)
    assert await targets.enable(old, TargetId("acme", url))
    await wait_until(lambda: {f"acme {url}", url} <= set(notified))
    assert await old.execute(SAVE_SNAPSHOT, url, "old", "abnormal", 12) == "UPDATE 0"
    assert tuple(await old_state(old, url)) == ("normal", None, None, 0)
    assert await states(old, url) == {"acme": "normal", "beta": "abnormal"}
    # The new owner loses its ownership when an old gateway enables an abnormal address.
    beta = TargetId("beta", url)
    await targets.take_over(old, [beta], "new")
    await old.execute(TAKE_OWNERSHIP, url, "old")
    await old.execute(SAVE_SNAPSHOT, url, "old", "abnormal", 12)
    assert await old.fetch(ENABLE, url)
    assert (
        await targets.save(
            old, [StoredTarget(target=beta, health=HealthSnapshot(12, None, None, abnormal=True))], "new"
        )
        == set()
    )
    assert await states(old, url) == {"acme": "normal", "beta": "normal"}
    await old.reset()
