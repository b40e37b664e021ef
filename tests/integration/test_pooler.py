"""A pooler in transaction mode before PostgreSQL: PgBouncer itself."""

from __future__ import annotations

from contextlib import AsyncExitStack
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from tests.callback_targets import LOOPBACK, SECRET, target_server
from tests.gateways import running_gateway
from tests.running import make_topics, running_service
from tests.servers import pooler
from tests.waiting import wait_until

from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.checks.app import check
from penstock.errors import CannotStart, SettingsError
from penstock.heartbeats import app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.postgres import roles
from penstock.postgres.connection import open_pool
from penstock.postgres.types import TaskType, register
from penstock.settings import Platform
from penstock.stages import app as stages
from penstock.stages.settings import StagesSettings
from penstock.task_sync import app as task_sync
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Done, Next, Worker, WorkerSettings


@pytest.fixture
async def admin(database):
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    yield connection
    await connection.close()


@pytest.fixture
async def urls(database, admin, tmp_path):
    """The URL of one user by the pooler, and past it."""
    parts = urlsplit(database)
    port = parts.port or int(parse_qs(parts.query).get("port", ["5432"])[0])
    name = "u_" + parts.path[1:]
    await admin.execute(f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD 'right'")
    async with pooler(tmp_path / "pooler", port, name, parts.path[1:], "right") as front:
        yield tuple(f"postgresql://{name}:right@127.0.0.1:{one}{parts.path}" for one in (front, port))
    await admin.execute(f"DROP OWNED BY {name}")
    await admin.execute(f"DROP ROLE {name}")


async def set_as_roles_are(admin, urls):
    """The settings that `penstock roles apply` gives its roles, for this user."""
    database = await admin.fetchval("SELECT quote_ident(current_database())")
    for statement in roles.script("x_", database):
        if statement.startswith("ALTER ROLE x_stages "):
            await admin.execute(statement.replace("x_stages", urlsplit(urls[0]).username))


def task(n, url):
    """One with a callback."""
    return {"type": "t", "context": {"n": n}, "callbacks": [url]}


async def test_tasks_flow_by_a_pooler_in_transaction_mode(kafka_servers, prefix, urls, admin):
    """S8: with the pooler's URL for pools and another for sessions, tasks of two stages pass every service, and their
    callbacks arrive; what is locked and listened to is in sessions past the pooler, and nothing else is."""
    await set_as_roles_are(admin, urls)
    where = {"kafka": kafka_servers, "prefix": prefix, "objects": "memory:///"}
    both = {"postgres": urls[0], "postgres_session": urls[1]}
    await make_topics(kafka_servers, prefix)
    worker = Worker(WorkerSettings(**where))

    @worker.stage("t.start")
    async def start(task):
        return Next("end", {"n": task.context["n"]})

    @worker.stage("t.end")
    async def end(task):
        return Done({"n": task.context["n"]})

    async def succeeded():
        return await admin.fetchval("SELECT count(*) FROM task WHERE state = 'succeeded'") == 40

    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_server())
        caller = CallbacksSettings(
            kafka=kafka_servers, prefix=prefix, **both, callback_secrets=(SECRET,), callback_allow=LOOPBACK
        )
        gateway = await stack.enter_async_context(running_gateway(**where, **both))
        answer = await gateway.post("/types", {"name": "t", "partitions": 2, "max_in_flight": 10})
        assert answer.status in (200, 201), answer.body
        for service in (
            task_sync.create_app(TaskSyncSettings(**where, **both)),
            heartbeats.create_app(HeartbeatsSettings(**where, **both)),
            stages.create_app(StagesSettings(**where, **both)),
            callbacks.create_app(caller),
            worker.serve,
        ):
            await stack.enter_async_context(running_service(service))
        for _ in range(4):
            answer = await gateway.post("/tasks", [task(n, target.url) for n in range(10)])
            assert answer.status == 201, answer.body
        await wait_until(succeeded, timeout=60)
        await wait_until(lambda: len(set(target.ids())) == 40, what="each callback has come")
        rows = await admin.fetch(
            "SELECT DISTINCT application_name AS name FROM pg_stat_activity WHERE usename = $1",
            urlsplit(urls[0]).username,
        )
        # The pooler's own sessions last as long as it lets them; those past it are these, by their names.
        holders = await admin.fetch(
            "SELECT DISTINCT a.application_name AS name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
            " WHERE l.locktype = 'advisory' AND a.usename = $1",
            urlsplit(urls[0]).username,
        )
        assert {row["name"].partition(" ")[2].partition(" ")[0] for row in holders} == {
            "callbacks",
            "task-sync",
            "stages",
        }
        assert len(rows) >= 3
        found = await check(Platform(kafka=kafka_servers, prefix=prefix, **both))
        assert found.clean, found


async def test_a_pooler_that_is_not_named_as_one_is_told(urls):
    """O8: PgBouncer's own refusal comes with the setting that is missing."""
    with pytest.raises(SettingsError, match="PENSTOCK_POSTGRES_SESSION"):
        async with open_pool(urls[0], "test"):
            pass


async def test_a_role_that_does_not_find_the_tables_is_told(urls):
    """O8: the settings of a session must be the role's own, behind a pooler."""
    with pytest.raises(CannotStart, match="penstock roles apply"):
        async with open_pool(urls[0], "test", pooled=True):
            pass


async def test_a_role_that_may_log_in_comes_by_the_pooler(database, admin, urls):
    """The settings that `roles apply` gives are enough; registering a type, which needs a transaction, goes through."""
    await set_as_roles_are(admin, urls)
    async with open_pool(urls[0], "test", pooled=True) as pool:
        for name in ("a", "b", "c"):
            await register(pool, TaskType(name=name, partitions=1))
        assert await pool.fetchval("SELECT count(*) FROM task_type") == 3
