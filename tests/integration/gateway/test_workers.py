"""The list of workers, and the reason of a stage that none of them has, on the real Kafka."""

import asyncio
import socket

import pytest
from tests.integration.cli.test_cli import penstock
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import running_gateway
from tests.support.invoking import documents
from tests.support.services import running_service, write
from tests.support.waiting import wait_until

from penstock import __version__
from penstock.client import Client, SyncClient
from penstock.core.why import WaitReason
from penstock.errors import KafkaRefused, KafkaUnavailable, NotFound
from penstock.gateway import why as gateway_why
from penstock.gateway import workers as gateway_workers
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import WORKERS
from penstock.postgres import types
from penstock.settings import Kafka
from penstock.worker import Done, Next, Worker, WorkerSettings
from penstock.worker.held_tokens import HeldTokens
from penstock.worker.kafka_transport import KafkaTransport

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
                    if {len(each["partitions"] or ()) for each in found.values()} == {1} and len(found) == 2
                    else None
                )

            found = await wait_until(both_have_a_partition)
            assert {each["state"] for each in found.values()} == {"running"}
            assert found[one.id]["stages"] == ["middle", "start"]
            assert found[two.id]["stages"] == ["start"]
            assert (found[one.id]["slots"], found[two.id]["slots"]) == (7, 9)
            assert {each["kind"] for each in found.values()} == {"worker"}
            assert sorted(found[one.id]["partitions"] + found[two.id]["partitions"]) == [0, 1]

        async def is_empty():
            return not await listed()

        # They have said that they end, so none of them is lost.
        await wait_until(is_empty, what="the workers have left")
        remote = make_worker(system, "start", worker_gateway=system.gateway.url)
        async with running_service(remote.serve):

            async def is_listed():
                found = await listed()
                return found if {each["kind"] for each in found.values()} == {"http", "gateway"} else None

            found = await wait_until(is_listed)
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
            # It is listed before it has partitions.
            return found.stdout if worker.id in found.stdout and "0-1" in found.stdout else None

        text = await wait_until(listed)
        assert "middle, start" in text
        [document] = documents(await penstock("workers", "--type", "t", "--json"))
        assert [each["id"] for each in document["workers"]] == [worker.id]

        def blocking():
            with SyncClient(system.gateway.url) as client:
                return [each["type"] for each in client.workers()]

        assert await asyncio.to_thread(blocking) == ["media", "t"]
        assert "type t: no lost worker" in (await penstock("workers", "--lost")).stdout


async def test_workers_say_what_they_have_in_flight(system):
    """H5: version, room, attempts in flight and last sign of life, on Kafka and over HTTP."""
    finish = asyncio.Event()

    def holding(**given):
        worker = Worker(WorkerSettings(**system.where, objects="memory:///", **given))

        @worker.stage("t.start")
        async def handler(task):
            await finish.wait()
            return Done()

        return worker

    async def listed(worker):
        [page] = (await system.gateway.get("/workers?type=t&state=running")).body["types"]
        [found] = [each for each in page["workers"] if each["id"] == worker.id] or [None]
        return found if found and found["in_flight"] == 2 else None

    for given in ({"pool": 7}, {"worker_gateway": system.gateway.url}):
        finish.clear()
        worker = holding(**given)
        async with running_service(worker.serve):
            async with Client(system.gateway.url) as client:
                tasks = await client.submit_many([{"type": "t", "context": None}] * 2)
            found = await wait_until(lambda worker=worker: listed(worker), what="two attempts are in flight")
            assert (found["tasks"], found["seen_at"] is None) == (None, False)
            assert (found["version"], found["stages"]) == (__version__, ["start"])
            assert found["host"] == socket.gethostname()
            if "pool" in given:
                assert (found["slots"], found["room"] >= 5) == (7, True)
            finish.set()
            async with Client(system.gateway.url) as client:
                await client.wait([task.id for task in tasks])


async def test_a_busy_worker_over_http_is_listed_by_a_gateway_that_begins_again(system, where):
    """H5, O5: by the attempts that PostgreSQL has under it. Another worker, and a key of another
    namespace, prove nothing by naming them."""
    await types.register(system.pool, types.TaskType(name="acme--t", partitions=1))
    task_id = (await system.gateway.post("/tasks", {"type": "acme--t", "context": None})).body["id"]
    # As if a gateway before had claimed it.
    await system.pool.execute("UPDATE task SET state = 'running', worker = 'w' WHERE id = $1", task_id)
    own, foreign = [
        sent((await make_key(where["postgres"], "worker", [name]))[1]) for name in ("acme", "beta")
    ]
    reader = sent((await make_key(where["postgres"], "reader"))[1])
    objects = where["objects"].removeprefix("file://")
    async with gateway_with_keys(where["kafka"], where["prefix"], where["postgres"], objects) as gateway:

        async def reported(worker, headers, task_id=task_id):
            """The reasons of `gone`, and the workers that are listed then."""
            entry = {"id": task_id, "step": 0, "stage": "start", "attempt": 0, "outcome": "progress"}
            body = {"worker": worker, "results": [entry]}
            gone = (await gateway.post("/set_task", body, headers=headers)).body["gone"]
            [page] = (await gateway.get("/workers?type=acme--t", headers=reader)).body["types"]
            rows = [(row["id"], row["state"], row["in_flight"]) for row in page["workers"]]
            return [each["why"] for each in gone], rows

        assert await reported("w", foreign) == (["over"], [])
        assert await reported("x", own) == (["taken over"], [])
        assert await reported("w", own, 2**40) == (["over"], [])
        assert await reported("w", own) == ([], [("w", "running", 1)])
        assert await reported("w", foreign) == (["over"], [("w", "running", 1)])


def status_of(worker, types, **given):
    """The record of a worker that writes one every tenth of a second, so it is lost soon."""
    return {"id": worker, "kind": "worker", "host": "h", "interval_s": 0.1, "types": types, **given}


async def test_a_lost_worker_is_listed_with_what_became_of_its_tasks(system, where, penstock, monkeypatch):
    """H5, O5: by a gateway that starts later, too. A record that names a task of another type shows
    nothing of it, and a key sees only the types of its namespaces."""
    await types.register(system.pool, types.TaskType(name="acme--t", partitions=1))
    await types.register(system.pool, types.TaskType(name="acme--u", partitions=1))
    ids = {
        name: (await system.gateway.post("/tasks", {"type": name, "context": None})).body["id"]
        for name in ("acme--t", "acme--u", "t")
    }
    await system.pool.execute(
        "INSERT INTO attempt (task_id, step, attempt, stage, outcome, finished_at) VALUES ($1, 0, 0, 'start', 'expired', now())",
        ids["acme--t"],
    )
    attempts = [[ids["acme--t"], 0, 0], [ids["acme--u"], 0, 0], [ids["t"], 0, 0], [2**40, 0, 0]]
    held = {"acme--t": {"stages": ["start"], "in_flight": 4, "attempts": attempts}, "t": {"in_flight": 1}}
    topic = where["prefix"] + WORKERS.name
    await write(where["kafka"], topic, b"no status", status_of("lost", held), status_of("left", held))
    await write(where["kafka"], topic, status_of("left", held, stopped=True))

    async def lost(caller, **more):
        pages = (await caller.get("/workers?state=lost", **more)).body["types"]
        return {page["type"]: page["workers"] for page in pages if page["workers"]}

    found = await wait_until(lambda: lost(system.gateway), what="the worker is lost")
    assert {name: [each["id"] for each in workers] for name, workers in found.items()} == {
        "acme--t": ["lost"],
        "t": ["lost"],
    }
    [worker] = found["acme--t"]
    assert (worker["in_flight"], worker["stages"], worker["partitions"]) == (4, ["start"], [])
    [task] = worker["tasks"]
    assert task == {
        "id": ids["acme--t"],
        "step": 0,
        "attempt": 0,
        "outcome": "expired",
        "state": task["state"],
    }
    assert found["t"][0]["tasks"] == []
    monkeypatch.setenv("PENSTOCK_GATEWAY", system.gateway.url)
    assert "1 attempt expired, now" in " ".join((await penstock("workers", "--lost")).stdout.split())

    objects = where["objects"].removeprefix("file://")
    # Before the gateway starts, so that it knows the key.
    _id, token = await make_key(where["postgres"], "reader", ["acme"])
    async with gateway_with_keys(where["kafka"], where["prefix"], where["postgres"], objects) as later:
        own = {"Authorization": f"Bearer {token}"}
        found = await wait_until(lambda: lost(later, headers=own), what="a later gateway knows it")
        assert list(found) == ["acme--t"]
        assert [each["id"] for each in found["acme--t"][0]["tasks"]] == [ids["acme--t"]]


async def test_a_cluster_without_the_topic_is_asked_once(where):
    """H5: and not until the end of the time for one record, as the client would."""
    settings = Kafka(kafka=where["kafka"], prefix=where["prefix"] + "new-")
    asked = []
    async with running(make_producer(settings)) as producer:
        transport = KafkaTransport(producer, settings, "w", HeldTokens())
        update = producer.client._metadata_update

        async def counted(cluster, topics):
            asked.append(None)
            return await update(cluster, topics)

        producer.client._metadata_update = counted
        for most in (2, 3):
            with pytest.raises(
                KafkaRefused, match=r"there is no topic .*new-workers: `penstock topics apply`"
            ):
                await transport.send_status(b"{}")
            assert len(asked) <= most
        await create_topics(settings, [WORKERS])

        async def is_written():
            try:
                await transport.send_status(b"{}")
            except KafkaRefused:
                return False
            return True

        await wait_until(is_written, what="the topic is there")


async def test_the_list_stays_while_kafka_is_away(system, monkeypatch):
    """H5: the gateway answers with what it knows, and says of when that is."""
    worker = make_worker(system, "start")
    async with running_service(worker.serve):

        async def listed():
            [page] = (await system.gateway.get("/workers?type=t")).body["types"]
            by_id = {each["id"]: each for each in page["workers"]}
            return page if worker.id in by_id and by_id[worker.id]["seen_at"] else None

        await wait_until(listed)

        async def away(_settings, _types):
            raise KafkaUnavailable("no broker answers")

        monkeypatch.setattr(gateway_workers, "members", away)
        page = await listed()
        assert page["rebalancing"] is False
        assert page["as_of"] is not None
        assert page["age_s"] >= 0
        assert [each["partitions"] for each in page["workers"]] == [None]
