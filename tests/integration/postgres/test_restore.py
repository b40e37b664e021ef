"""Backup and restore with the commands of docs/deploy/operations.md."""

from __future__ import annotations

from contextlib import AsyncExitStack

import asyncpg
import pytest
from tests.support.docs_commands import execute
from tests.support.pipeline import System
from tests.support.services import make_topics, write
from tests.support.shared_servers import database_dsn
from tests.support.waiting import wait_until

from penstock.checks.app import check
from penstock.postgres.connection import open_pool
from penstock.postgres.types import TaskType, register
from penstock.settings import Platform

PAGE = "deploy/operations.md"
BEFORE, AFTER = 20, 10


@pytest.fixture
async def restored(postgres_server, database):
    """Returns the name and the URL of the database that the page's commands create."""
    name = database.partition("?")[0].rpartition("/")[2] + "_restored"
    yield name, database_dsn(postgres_server, name)
    connection = await asyncpg.connect(postgres_server)
    await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await connection.close()


async def ids_of(pool, state=None):
    rows = await pool.fetch("SELECT id FROM task WHERE $1::text IS NULL OR state = $1", state)
    return {row["id"] for row in rows}


async def test_an_older_backup_is_restored_with_a_newer_kafka(
    kafka_servers, prefix, database, postgres_server, restored, tmp_path
):
    """O10: a backup is taken while tasks run, and restored after those and further tasks have
    ended. All its tasks succeed, later records are read again, no id repeats, and the check is
    clean."""
    name, url = restored
    await make_topics(kafka_servers, prefix)
    connection_settings = {"kafka": kafka_servers, "prefix": prefix}
    environment = {
        "PENSTOCK_KAFKA": kafka_servers,
        "PENSTOCK_PREFIX": prefix,
        "PENSTOCK_POSTGRES": database,
        "BACKUP": str(tmp_path),
        "SERVER": postgres_server,
        "NAME": name,
        "RESTORED": url,
    }
    topic = f"{prefix}submitted"
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        system = System(kafka_servers, prefix, database, stack, pool)
        # A small window and slow handlers: the backup holds ended, running, queued and ready tasks.
        await register(pool, TaskType(name="t", partitions=2, max_in_flight=8, lease_ms=3000))
        await system.start("task-sync", "heartbeats", "stages")
        await system.work(handler_s=1.2, pool=4)
        await system.submit(BEFORE)
        await write(kafka_servers, topic, *({"type": "t", "context": n} for n in range(BEFORE)))

        async def has_each_state():
            states = await system.states()
            return {"succeeded", "queued", "ready"} <= set(states) and sum(states.values()) == 2 * BEFORE

        await wait_until(has_each_state)
        await execute(PAGE, "backup", **environment)
        await write(kafka_servers, topic, *({"type": "t", "context": n} for n in range(AFTER)))
        lost = set(await system.submit(AFTER))
        await register(pool, TaskType(name="t", partitions=2, lease_ms=3000))
        await system.become(succeeded=2 * BEFORE + 2 * AFTER)
        used_ids = await ids_of(pool)
    await execute(PAGE, "restore", **environment)
    environment["PENSTOCK_POSTGRES"] = url
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(url, "test"))
        backed_up, ended = await ids_of(pool), await ids_of(pool, "succeeded")
        assert len(backed_up) == 2 * BEFORE
        assert 0 < len(ended) < len(backed_up)
        system = System(kafka_servers, prefix, url, stack, pool)
        await system.start("task-sync", "heartbeats", "stages")
        await system.work()
        await system.become(succeeded=2 * BEFORE + AFTER)
        new = set(await system.submit(1)) | (await ids_of(pool) - backed_up)
        assert not new & used_ids
        assert not lost & await ids_of(pool)
        await system.become(succeeded=2 * BEFORE + AFTER + 1)
        output = await execute(PAGE, "heal", **environment)
        assert "clean" in output
        found = await check(Platform(**connection_settings, postgres=url))
        assert found.clean, found
