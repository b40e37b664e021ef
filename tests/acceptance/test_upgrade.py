"""A rolling upgrade from the first release through made-up migrations, and of the services of
earlier commits, beside traffic."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import discovery
from penstock.checks.app import check
from penstock.client import Client, FlowDraft
from penstock.contracts.files import schemas_folder
from penstock.core.migration_steps import Step
from penstock.local.deployment import Deployment, Options
from penstock.postgres.migrations import migrate
from penstock.settings import Platform
from penstock.worker import Done, Next, Task, Worker, WorkerSettings
from tests.support.callback_targets import LOOPBACK, SECRET, Target, target_server
from tests.support.services import running_service
from tests.support.waiting import wait_until

BASELINE = schemas_folder() / "postgres" / "migrations" / "0001_baseline.sql"
DEFINITION = {
    "flow": "f",
    "version": 1,
    "nodes": {
        "all": {"kind": "map", "items": "[1, 2, 3]", "each": {"kind": "task", "type": "t", "input": "item"}},
        "last": {"kind": "task", "type": "t", "after": ["all"]},
    },
}
# A column beside an old one, which a trigger fills for services that do not know it.
MADE_UP = {
    "0002_stage_name": (
        "ALTER TABLE penstock.task ADD COLUMN stage_name text;"
        "CREATE FUNCTION penstock.name_stage() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.stage_name := NEW.stage; RETURN NEW; END $$;"
        "CREATE TRIGGER name_stage BEFORE INSERT OR UPDATE ON penstock.task"
        " FOR EACH ROW EXECUTE FUNCTION penstock.name_stage();"
    ),
    "0003_stage_name_index": (
        "CREATE INDEX CONCURRENTLY IF NOT EXISTS task_stage_name ON penstock.task (stage_name)"
    ),
    "0004_stage_name.post": (
        "DROP TRIGGER name_stage ON penstock.task; DROP FUNCTION penstock.name_stage();"
    ),
}
REPOSITORY = Path(__file__).parents[2]
MIGRATIONS = "schemas/postgres/migrations"
# A worker that the code of both commits can run.
WORKER = """
from penstock.worker import Done, Next, Worker

worker = Worker()


async def start(task):
    return Next("end", task.context)


async def end(task):
    return Done(task.context)


for type_name in ("t", "acme--t"):
    worker.stage(f"{type_name}.start")(start)
    worker.stage(f"{type_name}.end")(end)
"""
# Tasks and flows that are submitted, and end, in each phase of the upgrade.
PER_PHASE = 15


@asynccontextmanager
async def submitting(gateway: str, target: str, tasks: list[int], flows: list[int]) -> AsyncIterator[None]:
    """Submits until the block has ended and as many tasks as a phase needs were submitted."""
    enough = len(tasks) + PER_PHASE
    async with Client(gateway) as client:

        async def run() -> None:
            while not ended.is_set() or len(tasks) < enough:
                for type_name in ("t", "acme--t"):
                    submitted = await client.submit(type_name, 1, callbacks=[f"{target}/hook"])
                    tasks.append(submitted.id)
                flows.extend(flow.id for flow in await client.submit_flows([FlowDraft(flow="f")]))

        ended = asyncio.Event()
        task = asyncio.create_task(run())
        try:
            yield
        finally:
            ended.set()
            await task


async def test_tasks_run_through_both_steps_of_an_upgrade(
    shared_options: partial[Options], empty_database: str, tmp_path: Path
) -> None:
    """O9: an upgrade loses no task. Both steps of the schema run beside traffic: the first under
    old services, beside which new ones then start, and the second when the old ones have ended.
    Every task and flow ends once, each callback arrives once, and the check is clean."""
    folder = tmp_path / "migrations"
    folder.mkdir()
    shutil.copy(BASELINE, folder)
    options = partial(
        shared_options,
        postgres=empty_database,
        objects=f"file://{tmp_path}",
        environment={"PENSTOCK_CALLBACK_SECRETS": SECRET, "PENSTOCK_CALLBACK_ALLOW": ",".join(LOOPBACK)},
    )
    tasks: list[int] = []
    flows: list[int] = []
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_server())
        after = Deployment(options(data_dir=tmp_path / "after"))
        async with Deployment(options(data_dir=tmp_path / "before")) as before:
            kafka, prefix = before.kafka, before.addresses.prefix
            worker = Worker(WorkerSettings(kafka=kafka, prefix=prefix, objects=f"file://{tmp_path}"))
            async with Client(before.gateway_url) as client:
                for type_name in ("t", "acme--t"):
                    await client.register_type(type_name)

                    @worker.stage(f"{type_name}.start")
                    async def start(task: Task) -> Next:
                        return Next("end", task.context)

                    @worker.stage(f"{type_name}.end")
                    async def end(task: Task) -> Done:
                        return Done(task.context)

                await client.put_flow_definition(DEFINITION)
            await stack.enter_async_context(running_service(worker.serve))
            for name, text in MADE_UP.items():
                (folder / f"{name}.sql").write_text(text)
            async with submitting(before.gateway_url, target.url, tasks, flows):
                assert await migrate(empty_database, Step.PRE, folder=folder) == [*MADE_UP][:2]
            await stack.enter_async_context(after)
            async with (
                submitting(before.gateway_url, target.url, tasks, flows),
                submitting(after.gateway_url, target.url, tasks, flows),
            ):
                pass
            assert [before.exits(name) for name in before.processes] == [0] * len(before.processes)
        async with submitting(after.gateway_url, target.url, tasks, flows):
            assert await migrate(empty_database, Step.POST, folder=folder) == [*MADE_UP][2:]
        await ended_once(after, target, tasks, flows)


def earlier_commits() -> list[str]:
    """The last commit with each earlier schema whose migrations have not changed since, the newest
    first; empty where git does not know them."""

    def git(*words: str) -> list[str]:
        words = ("git", "-C", str(REPOSITORY), *words)
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()

    now = set(git("ls-tree", "-r", "HEAD", f"{MIGRATIONS}/"))
    commits = [f"{commit}^" for commit in git("log", "--format=%H", "--", MIGRATIONS)]
    return [commit for commit in commits if set() < set(git("ls-tree", "-r", commit, f"{MIGRATIONS}/")) < now]


def extract(commit: str, folder: Path) -> None:
    """Writes the code of a commit into a new folder."""
    words = ("git", "-C", str(REPOSITORY), "archive", commit, "services", "schemas")
    archive = subprocess.run(words, capture_output=True, check=True).stdout
    folder.mkdir()
    subprocess.run(("tar", "-x", "-C", str(folder)), input=archive, check=True)


@asynccontextmanager
async def started(
    code: Path, *words: str, folder: Path, environment: Mapping[str, str]
) -> AsyncIterator[None]:
    """Runs a verb of the penstock command with the code in a folder, until the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", *words),
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": str(code / "services")},
    )
    try:
        yield
        assert process.returncode is None, f"penstock {words[0]} has ended"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


@pytest.mark.long
@pytest.mark.parametrize("age", [-1, 0], ids=["the first schema", "the schema before"])
async def test_earlier_services_run_beside_new_services(
    shared_options: partial[Options], empty_database: str, tmp_path: Path, age: int
) -> None:
    """O9: the services and the worker of an earlier schema run, and later new ones beside them.
    Every task and flow ends once, with each callback once."""
    commits = await asyncio.to_thread(earlier_commits)
    if not commits:
        pytest.skip("the history of this checkout does not reach back to an earlier schema")
    old = tmp_path / "old"
    await asyncio.to_thread(extract, commits[age], old)
    (tmp_path / "shop.py").write_text(WORKER)
    data = tmp_path / "before"
    environment = {"PENSTOCK_CALLBACK_SECRETS": SECRET, "PENSTOCK_CALLBACK_ALLOW": ",".join(LOOPBACK)}
    given = shared_options(postgres=empty_database)
    servers = ("--kafka", str(given.kafka), "--postgres", empty_database, "--prefix", given.prefix)
    up = ("up", *servers, "--port", "0", "--data-dir", str(data))
    tasks: list[int] = []
    flows: list[int] = []
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_server())
        async with AsyncExitStack() as earlier:
            await earlier.enter_async_context(started(old, *up, folder=tmp_path, environment=environment))
            before = await wait_until(
                lambda: discovery.running(data), what="the services of the commit serve"
            )
            assert before.deployment is not None
            async with Client(before.gateway) as client:
                for type_name in ("t", "acme--t"):
                    await client.register_type(type_name)
                await client.put_flow_definition(DEFINITION)
            worker = ("worker", "shop:worker")
            await earlier.enter_async_context(
                started(old, *worker, folder=tmp_path, environment=before.environment())
            )
            async with submitting(before.gateway, target.url, tasks, flows):
                await migrate(empty_database, Step.PRE)
            after = await stack.enter_async_context(
                Deployment(
                    shared_options(
                        postgres=empty_database,
                        objects=before.objects,
                        environment=environment,
                        data_dir=tmp_path / "after",
                    )
                )
            )
            await stack.enter_async_context(
                started(REPOSITORY, *worker, folder=tmp_path, environment=after.environment)
            )
            async with (
                submitting(before.gateway, target.url, tasks, flows),
                submitting(after.gateway_url, target.url, tasks, flows),
            ):
                pass
        async with submitting(after.gateway_url, target.url, tasks, flows):
            await migrate(empty_database, Step.POST)
        await ended_once(after, target, tasks, flows)


async def ended_once(after: Deployment, target: Target, tasks: list[int], flows: list[int]) -> None:
    """Waits for all tasks and flows; each has ended once, with its callback, and the check is
    clean."""
    async with Client(after.gateway_url) as client:
        await client.wait(tasks)
        for flow_id in flows:
            assert (await client.wait_for_flow(flow_id)).status == "succeeded"
    ended = len(tasks) + 4 * len(flows)
    async with connected(after.postgres) as connection:
        await wait_until(
            lambda: connection.fetchval("SELECT every(state = 'delivered') FROM penstock.callback"),
            what="every callback is delivered",
        )
        assert len(set(target.ids())) == len(target.ids()) == len(set(tasks))
        ends = "SELECT state, count(*) FROM penstock.task GROUP BY state"
        assert dict(await connection.fetch(ends)) == {"succeeded": ended}
        attempts = "SELECT outcome, count(*) FROM penstock.attempt GROUP BY outcome"
        assert dict(await connection.fetch(attempts)) == {"done": ended, "next": ended}
    addresses = after.addresses
    platform = Platform(kafka=addresses.kafka, prefix=addresses.prefix, postgres=addresses.postgres)
    assert (await check(platform)).clean
    assert [after.exits(name) for name in after.processes] == [0] * len(after.processes)


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()
