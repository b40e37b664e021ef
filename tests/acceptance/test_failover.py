"""PostgreSQL fails over: services continue with the new primary and do not use a read-only
server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import pytest

from penstock.checks.app import check
from penstock.client import Client
from penstock.errors import PenstockError, PostgresUnavailable, SessionLost
from penstock.gateway import types
from penstock.gateway.settings import GatewaySettings
from penstock.local.deployment import Deployment, Options
from penstock.postgres.connection import open_pool, translated
from penstock.postgres.session import open_session
from penstock.postgres.types import TaskType, TypeCache, register
from penstock.settings import Platform
from penstock.worker import Done, Worker, WorkerSettings
from tests.chaos.standby import standby_pair
from tests.support.services import running_service, write
from tests.support.waiting import wait_until

SERVICES = {"gateway": 1, "task-sync": 1, "heartbeats": 1, "stages": 1}
TASKS = 60


@pytest.fixture
async def pair(tmp_path):
    async with standby_pair(tmp_path) as made:
        yield made


@pytest.fixture
def options_of(kafka_servers, prefix, pair, tmp_path):
    """Makes the options of a deployment whose database is a pair of servers."""
    return partial(
        Options,
        data_dir=tmp_path / "deployment",
        kafka=kafka_servers,
        postgres=pair.url,
        prefix=prefix,
        gateway_port=0,
        replicas=SERVICES,
    )


def settings_of(options, deployment):
    return {
        "kafka": options.kafka,
        "prefix": options.prefix,
        "objects": deployment.addresses.objects,
    }


async def test_services_continue_with_the_promoted_standby(pair, options_of):
    """S11: the primary is killed while tasks run. Every acknowledged task ends on the promoted
    standby, and the check is clean there."""
    standby = pair.standby
    options = options_of(environment={"PENSTOCK_SESSION_TIMEOUT_S": "6"})
    async with Deployment(options) as deployment, AsyncExitStack() as stack:
        url = options.postgres
        deployment_settings = settings_of(options, deployment)
        worker = Worker(WorkerSettings(**deployment_settings))
        done = 0

        @worker.stage("t.start")
        async def start(task):
            nonlocal done
            done += 1
            return Done()

        async with open_pool(url, "test") as pool:
            await register(pool, TaskType(name="t", partitions=2, starts_per_s=20))
        client = await stack.enter_async_context(Client(deployment.gateway_url))
        ids = [(await client.submit("t", n)).id for n in range(TASKS)]
        await stack.enter_async_context(running_service(worker.serve))
        await wait_until(lambda: done > TASKS // 4, what="tasks flow")
        assert done < TASKS
        await pair.promote()

        async def ended():
            states = await standby.ask(
                "SELECT count(*) FROM penstock.task WHERE state = 'succeeded' AND id = ANY ($1::bigint[])",
                ids,
            )
            return states == TASKS

        await wait_until(ended, what="every task has ended")
        found = await check(Platform(**deployment_settings, postgres=url))
        assert found.clean, found


@pytest.mark.long
async def test_a_lagging_standby_gives_no_task_the_result_of_another(kafka_servers, prefix, pair, options_of):
    """O10, S11: the standby has not received the last 150 tasks when the primary is killed and it
    is promoted, without a step by an operator. Records of the lost tasks are on Kafka; each task of
    the new primary succeeds with its own result, no id repeats, submissions by topic are read
    again, and the check is clean and names lost tasks."""
    primary, standby = pair.primary, pair.standby
    options = options_of(
        environment={
            "PENSTOCK_SESSION_TIMEOUT_S": "6",
            "PENSTOCK_RECHECK_S": "2",
            "PENSTOCK_RECOUNT_S": "5",
        }
    )
    async with Deployment(options) as deployment, AsyncExitStack() as stack:
        url = options.postgres
        deployment_settings = settings_of(options, deployment)
        worker = Worker(WorkerSettings(**deployment_settings, pool=8))

        @worker.stage("t.start")
        async def start(task):
            await asyncio.sleep(0.1)
            return Done(task.context)

        async with open_pool(url, "test") as pool:
            await register(pool, TaskType(name="t", partitions=2, lease_ms=5000))
        client = await stack.enter_async_context(Client(deployment.gateway_url))

        async def submit(begin, count):
            drafts = [{"type": "t", "context": begin + n} for n in range(count)]
            return {task.id for task in await client.submit_many(drafts)}

        async def count(server, where):
            return await server.ask(f"SELECT count(*) FROM penstock.task WHERE {where}")

        await stack.enter_async_context(running_service(worker.serve))
        kept = await submit(0, TASKS)
        await wait_until(lambda: count(primary, "state = 'succeeded'"), what="tasks flow")
        await pair.detach()
        lost = await submit(1000, 150)
        records = [{"type": "t", "context": 9000 + n} for n in range(20)]
        await write(kafka_servers, f"{prefix}submitted", *records)

        async def some_lost_tasks_ended():
            ingested = await count(primary, "context = convert_to('9019', 'UTF8')")
            return ingested and await count(primary, "state = 'succeeded'") > TASKS

        await wait_until(some_lost_tasks_ended, what="lost tasks run")
        await pair.promote()
        new = set()

        async def submitted_again():
            try:
                new.update(await submit(5000, 150))
            except PenstockError:
                return False
            return True

        await wait_until(submitted_again, what="the gateway submits to the promoted standby")
        assert not new & lost
        assert not kept & lost

        async def ended():
            # Submissions by topic are read again, since their offsets went back with their tasks.
            return await count(standby, "state = 'succeeded'") >= len(kept) + len(new) + len(records)

        await wait_until(ended, what="every task has ended")
        assert await count(standby, "state = 'succeeded'") == len(kept) + len(new) + len(records)
        assert await count(standby, "result IS DISTINCT FROM context") == 0
        found = await check(Platform(**deployment_settings, postgres=url))
        assert found.clean, found
        # The first lost tasks had ended.
        assert lost & set(found.missing)
        assert not (kept | new) & set(found.missing)


async def test_connections_leave_a_read_only_server(pair, monkeypatch):
    """S11: a pool whose server is demoted refuses writes and connects to the next writable server.
    A session with locks on the demoted server is lost, and a session to a standby is refused. A
    pool for reads accepts a standby."""
    primary, standby = pair.primary, pair.standby
    async with (
        open_pool(pair.url, "test") as pool,
        open_session(primary.url(), "test") as session,
    ):
        assert await pool.fetchval("SHOW port") == str(primary.port)
        monkeypatch.setattr(types, "WRITABLE_CHECK_S", 0.1)
        settings = GatewaySettings.load({}, postgres=pair.url)
        listen_task = asyncio.ensure_future(types.keep_fresh(settings, TypeCache(pool)))
        await wait_until(lambda: listens(primary), what="a gateway listens")
        await primary.ask("ALTER SYSTEM SET default_transaction_read_only = on")
        await primary.ask("SELECT pg_reload_conf()")
        await wait_until(lambda: lost(session), what="the session is lost")
        with pytest.raises(PostgresUnavailable, match="target_session_attrs"), translated():
            await pool.execute("CREATE TABLE a ()")
        await standby.ask("SELECT pg_promote()")
        await wait_until(lambda: moved(pool, standby), what="the pool connects to the standby")
        await wait_until(lambda: listens(standby), what="the gateway listens on the standby")
        listen_task.cancel()
    async with open_pool(primary.url(), "test", writing=False) as pool:
        assert await pool.fetchval("SELECT 1") == 1
        with pytest.raises(PostgresUnavailable, match="read-only"), translated():
            await pool.execute("CREATE TABLE a ()")
    with pytest.raises(PostgresUnavailable, match="takes no writes"):
        async with open_session(primary.url(), "test"):
            pass


async def lost(session):
    try:
        await session.fetch("history.now")
        session.ensure()
    except SessionLost:
        return True
    return False


async def moved(pool, standby):
    try:
        with translated():
            return await pool.fetchval("SHOW port") == str(standby.port)
    except PostgresUnavailable:
        return False


async def listens(server):
    return await server.ask(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'penstock gateway types'"
    )
