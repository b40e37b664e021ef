"""A rolling upgrade: services of an earlier revision and current ones run side by side on one
database and one cluster."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest

from penstock.checks.app import check
from penstock.client import Client, FlowDraft
from penstock.core.migration_steps import Step
from penstock.local.ports import choose_port
from penstock.postgres.migrations import migrate
from penstock.settings import Platform
from penstock.worker import Done, Next, Worker, WorkerSettings
from tests.support.callback_targets import LOOPBACK, SECRET, target_server
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
# The oldest revision with a promised upgrade: the first with 0024_target_namespaces.post. That step
# must be done before any later migration (`core/migration_steps.py`), so an older deployment is
# upgraded to this revision first.
OLDEST = "fdddcea"
# The last revision before modules, classes and metrics were renamed. The renaming must not have
# changed the wire formats and the schema.
BEFORE_RENAMING = "44f2b9b"
SERVICES = ("gateway", "task-sync", "heartbeats", "stages", "callbacks")
NEW_SERVICES = (*SERVICES, "flows")
TASKS_PER_TYPE = 10
FLOWS = 5
DEFINITION = {
    "flow": "f",
    "version": 1,
    "nodes": {
        "all": {"kind": "map", "items": "[1, 2, 3]", "each": {"kind": "task", "type": "t", "input": "item"}},
        "last": {"kind": "task", "type": "t", "after": ["all"]},
    },
}


@pytest.fixture(params=[pytest.param(OLDEST, marks=pytest.mark.long), BEFORE_RENAMING])
def revision(request):
    """The revision from which the deployment is upgraded."""
    return request.param


@pytest.fixture
def old(revision, tmp_path):
    """The source tree of that revision."""
    found = subprocess.run(
        ["git", "archive", revision, "services", "schemas"], cwd=ROOT, capture_output=True, check=False
    )
    if found.returncode:
        pytest.skip(
            f"the revision {revision} is not in this clone (a shallow one?): {found.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


class Release:
    """One of the two releases, as commands and processes."""

    def __init__(
        self, tree: Path, environment: dict[str, str], folder: Path, services: Sequence[str] = SERVICES
    ) -> None:
        self._services = services
        self.port = choose_port(0)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            **environment,
            "PYTHONPATH": str(tree / "services"),
            "PENSTOCK_GATEWAY_PORT": str(self.port),
        }
        self._folder = folder
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        folder.mkdir()

    async def run(self, *words: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *words),
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return output.decode()

    async def start(self) -> None:
        ready_files = {name: self._folder / f"{name}.ready" for name in self._services}
        for name, ready_file in ready_files.items():
            with (self._folder / "log").open("ab") as log:
                self._processes[name] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "penstock", "run", name),
                    env={**self._environment, "PENSTOCK_READY_FILE": str(ready_file)},
                    stdout=log,
                    stderr=log,
                )
        for name, ready_file in ready_files.items():
            await wait_until(ready_file.exists, what=f"{name} is ready")
            assert self._processes[name].returncode is None

    async def stop(self) -> dict[str, int]:
        """Stops all services and returns their exit statuses."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: await process.wait() for name, process in self._processes.items()}

    async def kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


async def run_flows(release: Release) -> None:
    """Runs flows to their end."""
    async with Client(f"http://127.0.0.1:{release.port}") as client:
        await client.put_flow_definition(DEFINITION)
        for flow in await client.submit_flows([FlowDraft(flow="f")] * FLOWS):
            assert (await client.wait_for_flow(flow.id)).status == "succeeded"


async def test_old_and_new_services_work_side_by_side(
    old, revision, kafka_servers, prefix, empty_database, tmp_path
):
    """O9: an upgrade from each supported revision loses no task. The first schema step runs under
    old services, then new services start beside them, old ones stop, and the second step follows.
    Every task ends once, its callback arrives, flows advance beside old services, and the check is
    clean."""
    environment = {
        "PENSTOCK_KAFKA": kafka_servers,
        "PENSTOCK_PREFIX": prefix,
        "PENSTOCK_POSTGRES": empty_database,
        "PENSTOCK_OBJECTS": f"file://{tmp_path}",
        "PENSTOCK_SESSION_TIMEOUT_S": "6",
        "PENSTOCK_CALLBACK_SECRETS": SECRET,
        "PENSTOCK_CALLBACK_ALLOW": ",".join(LOOPBACK),
    }
    before = Release(old, environment, tmp_path / "before")
    after = Release(ROOT, environment, tmp_path / "after", NEW_SERVICES)
    worker = Worker(WorkerSettings(kafka=kafka_servers, prefix=prefix, objects=f"file://{tmp_path}"))

    for type_name in ("t", "acme--t"):

        @worker.stage(f"{type_name}.start")
        async def start(task):
            return Next("end", task.context)

        @worker.stage(f"{type_name}.end")
        async def end(task):
            return Done(task.context)

    ids: list[int] = []
    connection = await asyncpg.connect(empty_database, server_settings={"search_path": "penstock"})

    async def submit(release: Release) -> None:
        async with Client(f"http://127.0.0.1:{release.port}") as client:
            for type_name in ("t", "acme--t"):
                ids.extend(
                    [
                        (await client.submit(type_name, n, callbacks=[f"{target.url}/hook"])).id
                        for n in range(TASKS_PER_TYPE)
                    ]
                )

    async def all_ended() -> bool:
        return await connection.fetchval(
            "SELECT count(*) FROM task WHERE state = 'succeeded' AND to_jsonb(task)->>'flow_id' IS NULL"
        ) == len(ids)

    async def all_delivered() -> bool:
        return await connection.fetchval("SELECT count(*) FROM callback WHERE state = 'delivered'") == len(
            ids
        )

    try:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(before.kill)
            stack.push_async_callback(after.kill)
            first = json.loads(await before.run("migrate", "--json"))["applied"]
            await before.run("topics")
            await before.start()
            target = await stack.enter_async_context(target_server())
            for type_name in ("t", "acme--t"):
                await before.run("types", "add", type_name, "--gateway", f"http://127.0.0.1:{before.port}")
            await submit(before)
            await stack.enter_async_context(running_service(worker.serve))
            # The first step runs while tasks are in flight.
            second = await migrate(empty_database, Step.PRE)
            assert first
            assert second
            assert not set(first) & set(second)
            await make_topics(kafka_servers, prefix)
            await submit(before)
            await wait_until(all_ended, what="the old version ends its tasks on the new schema")
            await after.start()
            # Old services end tasks of flows, too.
            await asyncio.gather(submit(before), submit(after), run_flows(after))
            await wait_until(all_ended, what="both end tasks")
            await submit(before)
            assert set((await before.stop()).values()) == {0}
            await migrate(empty_database, Step.POST)
            await submit(after)
            await wait_until(all_ended, what="the new version ends all tasks")
            await wait_until(all_delivered, what="every callback is delivered")
            assert len(set(ids)) == 12 * TASKS_PER_TYPE
            assert len(set(target.ids())) == 12 * TASKS_PER_TYPE
            callbacks_query = (
                "SELECT namespace, count(*) AS count FROM callback GROUP BY namespace ORDER BY namespace"
            )
            assert [tuple(row) for row in await connection.fetch(callbacks_query)] == [
                ("acme", 6 * TASKS_PER_TYPE),
                ("default", 6 * TASKS_PER_TYPE),
            ]
            platform = Platform(kafka=kafka_servers, prefix=prefix, postgres=empty_database)
            found = await check(platform, repair=True)
            assert found.clean, found
            assert set((await after.stop()).values()) == {0}
    finally:
        await connection.close()
        for release in ("before", "after"):
            # pytest shows it when the test fails.
            log = tmp_path / release / "log"
            sys.stderr.write(log.read_text()[-3000:] if log.exists() else "")
