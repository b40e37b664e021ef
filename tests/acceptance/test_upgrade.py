"""A rolling upgrade from the first release through made-up migrations, beside traffic."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg

from penstock.checks.app import check
from penstock.client import Client, FlowDraft
from penstock.contracts.files import schemas_folder
from penstock.core.migration_steps import Step
from penstock.local.deployment import Deployment, Options
from penstock.postgres.migrations import migrate
from penstock.settings import Platform
from penstock.worker import Done, Next, Task, Worker, WorkerSettings
from tests.support.callback_targets import LOOPBACK, SECRET, target_server
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
# Tasks and flows that are submitted, and end, in each phase of the upgrade.
PER_PHASE = 15


@asynccontextmanager
async def submitting(
    deployment: Deployment, target: str, tasks: list[int], flows: list[int]
) -> AsyncIterator[None]:
    """Submits until the block has ended and as many tasks as a phase needs were submitted."""
    enough = len(tasks) + PER_PHASE
    async with Client(deployment.gateway_url) as client:

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
            async with submitting(before, target.url, tasks, flows):
                assert await migrate(empty_database, Step.PRE, folder=folder) == [*MADE_UP][:2]
            await stack.enter_async_context(after)
            async with (
                submitting(before, target.url, tasks, flows),
                submitting(after, target.url, tasks, flows),
            ):
                pass
            assert [before.exits(name) for name in before.processes] == [0] * len(before.processes)
        async with submitting(after, target.url, tasks, flows):
            assert await migrate(empty_database, Step.POST, folder=folder) == [*MADE_UP][2:]
        async with Client(after.gateway_url) as client:
            await client.wait(tasks)
            for flow_id in flows:
                assert (await client.wait_for_flow(flow_id)).status == "succeeded"
        connection = await stack.enter_async_context(connected(empty_database))
        await wait_until(
            lambda: connection.fetchval("SELECT every(state = 'delivered') FROM penstock.callback"),
            what="every callback is delivered",
        )
        assert len(set(target.ids())) == len(target.ids()) == len(set(tasks))
        ends = "SELECT state, count(*) AS tasks FROM penstock.task GROUP BY state"
        assert [tuple(row) for row in await connection.fetch(ends)] == [
            ("succeeded", len(tasks) + 4 * len(flows))
        ]
        attempts = (
            "SELECT outcome, count(*) AS attempts FROM penstock.attempt GROUP BY outcome ORDER BY outcome"
        )
        assert {row["outcome"]: row["attempts"] for row in await connection.fetch(attempts)} == {
            "done": len(tasks) + 4 * len(flows),
            "next": len(tasks) + 4 * len(flows),
        }
        assert (await check(Platform(kafka=kafka, prefix=prefix, postgres=empty_database))).clean
        assert [after.exits(name) for name in after.processes] == [0] * len(after.processes)


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()
