"""The list of workers, and the reason of a stage that none of them has, on the real Kafka."""

import asyncio

import pytest
from tests.integration.cli.test_cli import penstock
from tests.support.gateways import running_gateway
from tests.support.invoking import documents
from tests.support.services import running_service
from tests.support.waiting import wait_until

from penstock.client import Client, SyncClient
from penstock.core.why import WaitReason
from penstock.errors import NotFound
from penstock.gateway import why as gateway_why
from penstock.postgres import types
from penstock.worker import Done, Next, Worker, WorkerSettings

__all__ = ["penstock"]  # fixture


@pytest.fixture(autouse=True)
def _without_lag_cache(monkeypatch):
    monkeypatch.setattr(gateway_why, "LAG_CACHE_S", 0.0)
    monkeypatch.setattr(gateway_why, "LAG_RETRY_S", 0.0)


@pytest.fixture
async def system(system, where):
    system.gateway = await system.stack.enter_async_context(running_gateway(**where))
    await wait_until(system.gateway.is_ready)
    await system.start("task-sync", "heartbeats", "stages")
    return system


def make_worker(system, *stages, leads_to="nowhere", **given):
    worker = Worker(WorkerSettings(**system.where, objects="memory:///", **given))

    async def handler(task):
        return Next(leads_to) if task.stage == "start" else Done()

    for stage in stages:
        worker.stage(f"t.{stage}")(handler)
    return worker


async def test_the_workers_of_a_type_are_listed(system):
    """W1: with their stages, slots and partitions, on Kafka and over HTTP; gone ones are not."""
    async with Client(system.gateway.url) as client:

        async def listed(name="t"):
            [found] = [each async for each in client.workers(name)]
            return {each["id"]: each for each in found["workers"]}

        one = make_worker(system, "start", "middle", pool=7)
        two = make_worker(system, "start", pool=9)
        async with running_service(one.serve), running_service(two.serve):

            async def both_have_a_partition():
                found = await listed()
                return (
                    found
                    if {len(each["partitions"]) for each in found.values()} == {1} and len(found) == 2
                    else None
                )

            found = await wait_until(both_have_a_partition)
            assert found[one.id]["stages"] == ["middle", "start"]
            assert found[two.id]["stages"] == ["start"]
            assert (found[one.id]["slots"], found[two.id]["slots"]) == (7, 9)
            assert {each["kind"] for each in found.values()} == {"worker"}
            assert sorted(found[one.id]["partitions"] + found[two.id]["partitions"]) == [0, 1]

        async def is_empty():
            return not await listed()

        await wait_until(is_empty, what="the workers have left")
        remote = make_worker(system, "start", worker_gateway=system.gateway.url)
        async with running_service(remote.serve):

            async def is_listed():
                found = await listed()
                return found if {each["kind"] for each in found.values()} == {"http", "gateway"} else None

            found = await wait_until(is_listed)
            assert found[remote.id]["host"] == "127.0.0.1"
            assert found[remote.id]["seen_at"] is not None
            [behind] = [each for each in found.values() if each["kind"] == "gateway"]
            assert behind["partitions"] == [0, 1]
        with pytest.raises(NotFound, match="there is no task type 'unknown'"):
            await listed("unknown")


async def test_pages_have_all_types(system):
    """A page asks Kafka about few groups; the pages together have each type once."""
    for number in range(5):
        await types.register(system.pool, types.TaskType(name=f"u{number}", partitions=1))
    found, cursor = [], ""
    while cursor is not None:
        page = (await system.gateway.get(f"/workers?limit=2{cursor and f'&cursor={cursor}'}")).body
        assert len(page["types"]) <= 2
        found += [each["type"] for each in page["types"]]
        cursor = page["next"]
    assert found == ["t", "u0", "u1", "u2", "u3", "u4"]
    assert (await system.gateway.get("/workers?limit=101")).status == 422


async def test_a_stage_that_no_connected_worker_has_is_the_reason(system):
    """W1: `why` says so before a worker has handed the task back, until a worker with the stage is
    connected."""
    async with Client(system.gateway.url) as client:
        worker = make_worker(system, "start", leads_to="nowhere")
        async with running_service(worker.serve):
            [task] = await client.submit_many([{"type": "t", "context": None}])

            async def reason():
                why = await client.why(task.id)
                return why if why["reason"] == WaitReason.NO_HANDLER else None

            why = await wait_until(reason)
            assert "'nowhere'" in why["sentence"]
            assert "start" in why["sentence"]
            other = make_worker(system, "start", "nowhere")
            async with running_service(other.serve):
                assert (await client.results([task.id]))[0].state == "succeeded"


async def test_a_first_stage_that_no_worker_has_is_told_at_submission(system, penstock, monkeypatch):
    """W1: the command line warns and submits; with a worker for the stage it warns of nothing."""
    monkeypatch.setenv("PENSTOCK_GATEWAY", system.gateway.url)

    def submit(*more):
        return penstock("submit", "t", *more)

    async def warned():
        found = await submit()
        return found if "warning: no worker" in found.stderr else None

    await wait_until(warned, what="a submission without any worker warns")
    worker = make_worker(system, "other")
    async with running_service(worker.serve):

        async def names_the_stage():
            found = await submit("--stage", "start")
            return "has a handler for its stage 'start'; they have: other" in found.stderr

        await wait_until(names_the_stage)
    worker = make_worker(system, "start", leads_to="start")
    async with running_service(worker.serve):

        async def is_silent():
            return not (await submit()).stderr

        await wait_until(is_silent)
        assert (await submit("--json")).stderr == ""


async def test_the_command_line_lists_workers(system, penstock, monkeypatch):
    """W1: as a table, and as JSON."""
    monkeypatch.setenv("PENSTOCK_GATEWAY", system.gateway.url)
    worker = make_worker(system, "start", "middle", pool=7)
    async with running_service(worker.serve):

        async def listed():
            found = await penstock("workers")
            return found.stdout if worker.id in found.stdout else None

        text = await wait_until(listed)
        assert "middle, start" in text
        assert "0-1" in text
        [document] = documents(await penstock("workers", "--type", "t", "--json"))
        assert [each["id"] for each in document["workers"]] == [worker.id]

        def blocking():
            with SyncClient(system.gateway.url) as client:
                return [each["type"] for each in client.workers()]

        assert await asyncio.to_thread(blocking) == ["media", "t"]
