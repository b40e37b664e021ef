"""Types in the code of a worker, registered at a real gateway."""

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.support.api_keys import make_key, sent
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.services import make_topics, running_service
from tests.support.waiting import in_time, wait_until

from penstock.client import Client
from penstock.core.access import Role
from penstock.core.task import State
from penstock.errors import SettingsError
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.worker import Done, Type, Worker, WorkerSettings


@pytest.fixture
async def pool(database):
    async with open_pool(database, "test") as opened:
        yield opened


@pytest.fixture
async def stack(pool):
    async with AsyncExitStack() as entered:
        yield entered


@asynccontextmanager
async def gateway_of(database, **where):
    async with running_gateway(**where, postgres=database, objects="memory:///") as gateway:
        yield gateway


def make_worker(kafka, prefix, *declared, differ="change", **given):
    settings = WorkerSettings(kafka=kafka, prefix=prefix, objects="memory:///", **given)
    worker = Worker(settings, types=declared, types_differ=differ)

    @worker.stage("order.reserve")
    async def reserve(_task):
        return Done("reserved")

    return worker


async def registered(pool, name="order"):
    return (await types.all_types(pool)).get(name)


@pytest.mark.parametrize("over_http", [False, True], ids=["kafka", "http"])
async def test_a_worker_registers_its_types_and_runs_their_tasks(
    kafka_servers, prefix, database, pool, stack, over_http
):
    """W1: a type of the code needs no `penstock types add`, also when two workers start with it. A
    second start changes nothing."""
    await make_topics(kafka_servers, prefix)
    system = System(kafka_servers, prefix, database, stack, pool)
    await system.start("task-sync", "heartbeats", "stages")
    gateway = await stack.enter_async_context(gateway_of(database, kafka=kafka_servers, prefix=prefix))
    await wait_until(gateway.is_ready)
    where = {"worker_gateway" if over_http else "gateway": gateway.url}
    declared = Type("order", first_stage="reserve", lease_s=60, max_attempts=2)
    for _ in range(2):
        worker = make_worker(kafka_servers, prefix, declared, **where)
        await stack.enter_async_context(running_service(worker.serve))
    found = await registered(pool)
    assert (found.first_stage, found.lease_ms, found.max_attempts) == ("reserve", 60_000, 2)
    async with Client(gateway.url) as client:
        task = await client.submit_and_wait("order")
    assert (task.state, task.result) == (State.SUCCEEDED, "reserved")


async def test_a_registered_type_that_differs_is_changed(kafka_servers, prefix, database, pool, stack):
    """W1: the settings of the code apply, and those that the code leaves out stay."""
    gateway = await stack.enter_async_context(gateway_of(database, kafka=kafka_servers, prefix=prefix))
    await make_topics(kafka_servers, prefix)
    await types.register(
        pool,
        types.TaskType(
            name="order", first_stage="reserve", partitions=2, lease_ms=1000, max_in_flight=7, paused=True
        ),
    )
    worker = make_worker(kafka_servers, prefix, Type("order", lease_s=9), gateway=gateway.url)
    async with running_service(worker.serve):
        found = await registered(pool)
        assert (found.lease_ms, found.max_in_flight, found.paused) == (9000, 7, True)
        assert (found.first_stage, found.partitions) == ("reserve", 2)


async def test_the_start_refuses_a_type_that_differs_by_choice(kafka_servers, prefix, database, pool, stack):
    """W1: the error names the fields that differ with both values, and nothing is changed."""
    gateway = await stack.enter_async_context(gateway_of(database, kafka=kafka_servers, prefix=prefix))
    before, _ = await types.register(pool, types.TaskType(name="order", lease_ms=1000, max_attempts=3))
    declared = Type("order", lease_s=9, max_attempts=3, first_stage="reserve")
    worker = make_worker(kafka_servers, prefix, declared, differ="refuse", gateway=gateway.url)
    with pytest.raises(SettingsError) as refused:
        async with running_service(worker.serve):
            pass
    text = str(refused.value)
    assert "lease_ms=9000 (registered: 1000)" in text
    assert "first_stage='reserve' (registered: 'start')" in text
    assert "max_attempts" not in text
    assert await registered(pool) == before


async def test_a_type_that_the_gateway_refuses_ends_the_start(kafka_servers, prefix, database, pool, stack):
    """O8: the error names type and setting."""
    gateway = await stack.enter_async_context(gateway_of(database, kafka=kafka_servers, prefix=prefix))
    await types.register(pool, types.TaskType(name="order"))
    for declared, message in (
        (Type("order", partitions=4), "partitions=4 (registered: 8): partitions cannot be changed"),
        (Type("order", lease_ms=1), "lease_ms"),
        (Type("new", max_attempts=0), "max_attempts"),
        (Type("new", events="some"), "events"),
    ):
        worker = make_worker(kafka_servers, prefix, declared, gateway=gateway.url)
        with pytest.raises(SettingsError) as refused:
            async with running_service(worker.serve):
                pass
        assert f"Type('{declared.name}')" in str(refused.value)
        assert message in str(refused.value)


async def test_a_first_stage_without_handler_is_a_warning(
    kafka_servers, prefix, database, pool, stack, caplog
):
    """W1: tasks would wait for another worker, so the start warns with type and stage."""
    gateway = await stack.enter_async_context(gateway_of(database, kafka=kafka_servers, prefix=prefix))
    await make_topics(kafka_servers, prefix)
    worker = make_worker(
        kafka_servers,
        prefix,
        Type("order", first_stage="reserve"),
        Type("order2", first_stage="pack"),
        gateway=gateway.url,
    )
    async with running_service(worker.serve):
        [record] = [each for each in caplog.records if getattr(each, "event", "") == "first_stage_unhandled"]
        assert (record.task_type, record.stage) == ("order2", "pack")


async def test_registration_needs_a_role_only_for_changes(kafka_servers, prefix, database, pool, stack):
    """O5: a key that may read suffices while nothing differs; the error names the role."""
    gateway = await stack.enter_async_context(
        gateway_of(database, kafka=kafka_servers, prefix=prefix, gateway_auth="keys")
    )
    await make_topics(kafka_servers, prefix)

    async def start(role, declared):
        _id, token = await make_key(database, role)

        async def key_is_known():
            return (await gateway.get("/types", headers=sent(token))).status != 401

        await wait_until(key_is_known)
        worker = make_worker(kafka_servers, prefix, declared, gateway=gateway.url, api_key=token)
        async with running_service(worker.serve):
            pass

    declared = Type("order", first_stage="reserve")
    for role in (Role.READER, Role.WORKER):
        with pytest.raises(SettingsError, match="give PENSTOCK_API_KEY a key with the role admin"):
            await start(role, declared)
    await start(Role.ADMIN, declared)
    await start(Role.READER, declared)


async def test_a_key_that_is_not_valid_yet_is_tried_again(
    kafka_servers, prefix, database, pool, stack, tmp_path, caplog
):
    """O5: a gateway learns of a new key a moment later, and a file may be replaced. A worker that
    has waited for long enough ends, and names the source of the key."""
    gateway = await stack.enter_async_context(
        gateway_of(database, kafka=kafka_servers, prefix=prefix, gateway_auth="keys")
    )
    await make_topics(kafka_servers, prefix)
    file = tmp_path / "key"
    file.write_text("pk_" + "0" * 16 + "_x")
    declared = Type("order", first_stage="reserve")
    where = {"gateway": gateway.url, "api_key_file": str(file)}
    worker = make_worker(kafka_servers, prefix, declared, **where)
    async with running_service(worker.serve):
        assert await registered(pool) is None
        file.write_text((await make_key(database, Role.ADMIN))[1])
        await wait_until(lambda: registered(pool))
    file.write_text("pk_" + "0" * 16 + "_x")
    hasty = make_worker(kafka_servers, prefix, declared, refused_timeout_s=0.0, **where)
    with pytest.raises(SettingsError, match=r"refuses the key in .*key"):
        async with running_service(hasty.serve):
            pass


async def test_an_unavailable_gateway_delays_no_worker_that_uses_kafka(
    kafka_servers, prefix, database, pool, stack, caplog
):
    """O6: by default the worker starts, and registers its types once a gateway answers. By choice
    it waits for the gateway, because it must not run tasks of another type."""
    await make_topics(kafka_servers, prefix)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"gateway": f"http://127.0.0.1:{port}"}
    declared = Type("order", first_stage="reserve")
    worker = make_worker(kafka_servers, prefix, declared, **where)
    await stack.enter_async_context(running_service(worker.serve))
    assert "types_unregistered" in {getattr(record, "event", "") for record in caplog.records}
    refusing = make_worker(kafka_servers, prefix, declared, differ="refuse", **where)
    starting = stack.enter_async_context(running_service(refusing.serve))
    starting = asyncio.ensure_future(starting)

    def waits():
        return any(getattr(record, "waiting_for", "") == "registration of types" for record in caplog.records)

    await wait_until(waits)
    assert not starting.done()
    assert await registered(pool) is None
    await stack.enter_async_context(
        gateway_of(database, kafka=kafka_servers, prefix=prefix, gateway_port=port)
    )
    await starting
    await wait_until(lambda: registered(pool))


async def test_a_worker_that_waits_for_a_gateway_stops_at_once(caplog):
    """O6: a signal ends the wait before the first task; no attempt is drained."""
    worker = Worker(
        kafka="127.0.0.1:1", gateway="http://127.0.0.1:1", types=[Type("order")], types_differ="refuse"
    )

    @worker.stage("order.start")
    async def start(_task):
        return Done()

    stopping = asyncio.Event()
    serving = asyncio.ensure_future(worker.serve(stopping))

    def waits():
        return any(getattr(record, "waiting_for", "") == "registration of types" for record in caplog.records)

    await wait_until(waits)
    stopping.set()
    await in_time(serving)
