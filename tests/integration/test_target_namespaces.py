"""Targets get namespaces (migrations 0022 to 0024) under running services: what is kept, and what old and new code tell each other."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.waiting import wait_until

from penstock.contracts.files import schemas_folder
from penstock.core.access import namespace_of
from penstock.core.health import Vitals
from penstock.core.migrating import Step
from penstock.core.target import TargetId
from penstock.postgres import targets
from penstock.postgres.migrations import migrate
from penstock.postgres.targets import CHANNEL, Kept

FOLDER = schemas_folder() / "postgres" / "migrations"
BEFORE = 21

# What code of the release before says, to the letter.
OWN = "INSERT INTO target AS t (url, owner) VALUES ($1, $2) ON CONFLICT (url) DO UPDATE SET owner = excluded.owner"
KEEP = (
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
OWE = "INSERT INTO callback (id, target, task_id, body, due_at) VALUES ($1, $2, $3, '{}', now())"


@pytest.fixture
async def old(empty_database: str, tmp_path: Path) -> AsyncIterator[Any]:
    """A database as the release before left it, and a connection of it."""
    for file in sorted(FOLDER.glob("*.sql"))[:BEFORE]:
        shutil.copy(file, tmp_path)
    await migrate(empty_database, folder=tmp_path)
    connection = await asyncpg.connect(empty_database, server_settings={"search_path": "penstock"})
    yield connection
    await connection.close()


async def task(connection: Any, type_name: str) -> int:
    await connection.execute("INSERT INTO task_type (name) VALUES ($1) ON CONFLICT DO NOTHING", type_name)
    made: int = await connection.fetchval(
        "INSERT INTO task (type, state, stage, content_type, context) VALUES ($1, 'ready', 's', 'json', 'null') RETURNING id",
        type_name,
    )
    return made


async def states(connection: Any, url: str) -> dict[str, str]:
    rows = await connection.fetch("SELECT namespace, state FROM callback_target WHERE url = $1", url)
    return {row["namespace"]: row["state"] for row in rows}


async def old_state(connection: Any, url: str) -> Any:
    return await connection.fetchrow("SELECT state, why, rate, count FROM target WHERE url = $1", url)


async def test_what_was_said_of_an_address_holds_in_every_namespace(old: Any, empty_database: str) -> None:
    """O5, O9: after the first step an address that was disabled, limited or slow for all is so for each namespace; nobody sees the
    calls of another; and each callback there is belongs to the namespace of its task."""
    tasks = {name: await task(old, name) for name in ("order", "acme--order", "beta--a--b", "--odd")}
    for number, one in enumerate(tasks.values()):
        await old.execute(OWE, f"cb{number}", "http://gone/", one)
    await old.execute(OWE, "orphan", "http://gone/", 999)
    await old.execute(DISABLE, "http://gone/", "410")
    await old.execute(LIMIT, "http://limited/", 5.0)
    for url, state, count in (("http://slow/", "abnormal", 12), ("http://quiet/", "normal", 0)):
        await old.execute(OWN, url, "old")
        await old.execute(KEEP, url, "old", state, count)
    assert await migrate(empty_database, Step.PRE) == ["0022_target_namespaces", "0023_callback_namespaces"]
    everywhere = ("acme", "beta", "default")
    assert await states(old, "http://gone/") == dict.fromkeys(everywhere, "disabled")
    assert await states(old, "http://slow/") == dict.fromkeys(everywhere, "abnormal")
    assert await states(old, "http://limited/") == dict.fromkeys(everywhere, "normal")
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


async def test_where_nobody_uses_namespaces_everything_is_kept(old: Any, empty_database: str) -> None:
    """O9: with types of one namespace only, rows and their latest calls are as they were."""
    await task(old, "order")
    await old.execute(OWN, "http://quiet/", "old")
    await old.execute(KEEP, "http://quiet/", "old", "normal", 0)
    columns = "url, state, why, count, slow_at, called_at, failures, rate, attempts, changed_at"
    before = await old.fetch(f"SELECT {columns} FROM target")
    await migrate(empty_database, Step.PRE)
    assert await old.fetch(f"SELECT {columns} FROM callback_target") == before
    assert await states(old, "http://quiet/") == {"default": "normal"}


async def test_old_and_new_code_heed_each_other_between_the_steps(old: Any, empty_database: str) -> None:
    """O5, O9: between the steps what old code counts and says of an address reaches all namespaces, what new code says of a target
    reaches old code, each is notified, and neither undoes what the other has said; callbacks of old code get their namespace."""
    acme_task, _beta_task, plain = [await task(old, name) for name in ("acme--o", "beta--o", "o")]
    await migrate(empty_database, Step.PRE)
    told: list[str] = []
    await old.add_listener(CHANNEL, lambda *given: told.append(given[-1]))
    url, everywhere = "http://a/", ("acme", "beta", "default")
    acme, beta = TargetId("acme", url), TargetId("beta", url)

    await old.execute(OWE, "cb1", url, acme_task)
    await old.execute(OWE, "cb2", url, plain)
    rows = await old.fetch("SELECT id, namespace FROM callback")
    assert {row["id"]: row["namespace"] for row in rows} == {"cb1": "acme", "cb2": "default"}

    await old.execute(OWN, url, "old")
    assert await states(old, url) == {}
    await old.execute(KEEP, url, "old", "abnormal", 12)
    assert await states(old, url) == dict.fromkeys(everywhere, "abnormal")
    assert told == []
    # The owner of the new release goes on from there, and stays the owner while the old one only counts.
    pool = old
    assert {kept.vitals.count for kept in await targets.own(pool, [acme, beta], "new")} == {12}
    await old.execute(KEEP, url, "old", "abnormal", 13)
    assert await targets.keep(
        pool, [Kept(target=one, vitals=Vitals(14, None, None, abnormal=True)) for one in (acme, beta)], "new"
    ) == {acme, beta}

    assert await targets.disable(old, acme, "ours")
    found = await old_state(old, url)
    assert (found["state"], found["why"]) == ("disabled", "ours")
    await wait_until(lambda: {"acme http://a/", "http://a/"} <= set(told))
    # Old code, which has read that, counts on: beta is none the worse, and acme stays disabled.
    await old.execute(OWN, url, "old")
    await old.execute(KEEP, url, "old", "normal", 3)
    assert await states(old, url) == {"acme": "disabled", "beta": "abnormal", "default": "abnormal"}
    assert await targets.disable(old, beta, "theirs")
    assert await targets.enable(old, acme)
    assert (await old_state(old, url))["state"] == "disabled"
    assert await targets.enable(old, beta)
    found = await old_state(old, url)
    assert (found["state"], found["why"], found["count"]) == ("normal", None, 0)

    told.clear()
    assert await old.fetch(DISABLE, url, "until noon")
    assert await states(old, url) == dict.fromkeys(everywhere, "disabled")
    await wait_until(lambda: {f"{one} {url}" for one in everywhere} <= set(told))
    assert await targets.keep(pool, [Kept(target=acme, vitals=Vitals())], "new") == set()
    assert await old.fetch(ENABLE, url)
    assert await states(old, url) == dict.fromkeys(everywhere, "normal")

    await targets.limit(old, acme, 2.0)
    await targets.limit(old, beta, 3.0)
    assert (await old_state(old, url))["rate"] == 2.0
    await old.execute(LIMIT, url, 7.0)
    assert {row["rate"] for row in await targets.get(old, url)} == {7.0}
    await targets.limit(old, TargetId("acme", "http://new/"), 2.0)
    assert tuple(await old_state(old, "http://new/")) == ("normal", None, 2.0, 0)
    await old.reset()

    assert await migrate(empty_database, Step.POST) == ["0024_target_namespaces.post"]
    assert await old.fetchval("SELECT to_regclass('penstock.target')") is None
    left = "SELECT count(*) FROM pg_trigger WHERE tgrelid IN ('callback'::regclass, 'callback_target'::regclass) AND NOT tgisinternal"
    assert await old.fetchval(left) == 0
    assert await targets.disable(old, beta, "theirs again")
    assert await states(old, url) == {"acme": "normal", "beta": "disabled", "default": "normal"}
