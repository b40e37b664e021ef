"""PgBouncer in transaction mode in front of PostgreSQL."""

from __future__ import annotations

from contextlib import AsyncExitStack
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from tests.support.callback_targets import LOOPBACK, SECRET, target_server
from tests.support.gateways import running_gateway
from tests.support.postgres_servers import pooler
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.checks.app import check
from penstock.errors import CannotStart, SettingsError
from penstock.heartbeats import app as heartbeats
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.postgres import roles
from penstock.postgres.connection import open_pool
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
    """Creates a user and returns its URLs: through the pooler, and directly to the server."""
    parts = urlsplit(database)
    port = parts.port or int(parse_qs(parts.query).get("port", ["5432"])[0])
    name = "u_" + parts.path[1:]
    await admin.execute(f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD 'right'")
    async with pooler(tmp_path / "pooler", port, name, parts.path[1:], "right") as pooler_port:
        yield tuple(
            f"postgresql://{name}:right@127.0.0.1:{port_}{parts.path}" for port_ in (pooler_port, port)
        )
    await admin.execute(f"DROP OWNED BY {name}")
    await admin.execute(f"DROP ROLE {name}")


async def apply_role_settings(admin, urls):
    """Gives this user the settings that `penstock roles apply` gives its roles."""
    database = await admin.fetchval("SELECT quote_ident(current_database())")
    for statement in roles.script("x_", database):
        if statement.startswith("ALTER ROLE x_stages "):
            await admin.execute(statement.replace("x_stages", urlsplit(urls[0]).username))


def task(n, url):
    """Returns a submission with a callback."""
    return {"type": "t", "context": {"n": n}, "callbacks": [url]}


async def test_tasks_succeed_through_a_pooler_in_transaction_mode(kafka_servers, prefix, urls, admin):
    """S8: with the pooler's URL for pools and a direct URL for sessions, tasks of two stages pass
    every service and their callbacks arrive. Only direct sessions hold locks and listen."""
    await apply_role_settings(admin, urls)
    connection_settings = {"kafka": kafka_servers, "prefix": prefix, "objects": "memory:///"}
    postgres_urls = {"postgres": urls[0], "postgres_session": urls[1]}
    await make_topics(kafka_servers, prefix)
    worker = Worker(WorkerSettings(**connection_settings))

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
        callback_settings = CallbacksSettings(
            kafka=kafka_servers,
            prefix=prefix,
            **postgres_urls,
            callback_secrets=(SECRET,),
            callback_allow=LOOPBACK,
        )
        gateway = await stack.enter_async_context(running_gateway(**connection_settings, **postgres_urls))
        response = await gateway.post("/types", {"name": "t", "partitions": 2, "max_in_flight": 10})
        assert response.status in (200, 201), response.body
        for service in (
            task_sync.create_app(TaskSyncSettings(**connection_settings, **postgres_urls)),
            heartbeats.create_app(HeartbeatsSettings(**connection_settings, **postgres_urls)),
            stages.create_app(StagesSettings(**connection_settings, **postgres_urls)),
            callbacks.create_app(callback_settings),
            worker.serve,
        ):
            await stack.enter_async_context(running_service(service))
        for _ in range(4):
            response = await gateway.post("/tasks", [task(n, target.url) for n in range(10)])
            assert response.status == 201, response.body
        await wait_until(succeeded)
        await wait_until(lambda: len(set(target.ids())) == 40, what="each callback arrives")
        rows = await admin.fetch(
            "SELECT DISTINCT application_name AS name FROM pg_stat_activity WHERE usename = $1",
            urlsplit(urls[0]).username,
        )
        # Only direct sessions hold advisory locks; their names tell the services apart.
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
        found = await check(Platform(kafka=kafka_servers, prefix=prefix, **postgres_urls))
        assert found.clean, found


async def test_an_undeclared_pooler_is_reported(urls):
    """O8: a pool through an undeclared PgBouncer raises an error that names the missing setting."""
    with pytest.raises(SettingsError, match="PENSTOCK_POSTGRES_SESSION"):
        async with open_pool(urls[0], "test"):
            pass


async def test_a_role_without_session_settings_is_reported(urls):
    """O8: a role behind a pooler without the settings of a session raises an error that names
    `penstock roles apply`."""
    with pytest.raises(CannotStart, match="penstock roles apply"):
        async with open_pool(urls[0], "test", pooled=True):
            pass
