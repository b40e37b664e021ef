"""HTTP workers of several gateways: which worker gets a task, and how an undelivered answer is
returned."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from aiohttp import web
from aiokafka import AIOKafkaConsumer
from tests.support.gateways import Caller, running_gateway
from tests.support.services import producing, read, running_service
from tests.support.waiting import in_time, wait_until

from penstock.contracts.context import ContentType, Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.errors import KafkaUnavailable
from penstock.gateway import hold
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology import group_members
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import HEARTBEATS, STAGE_RESULTS, ready, workers_group
from penstock.objects import ObjectStore
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

Start = Any


@pytest.fixture
async def kafka(where: dict[str, Any]) -> Kafka:
    settings = Kafka(kafka=where["kafka"], prefix=where["prefix"])
    await create_topics(settings, [ready("two", 2), ready("one", 1)])
    return settings


@pytest.fixture
async def start(kafka: Kafka, database: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts gateways with a `gateway_linger_s` longer than the test, so that only idle release
    frees their partitions."""
    async with AsyncExitStack() as stack:

        async def start(**more: Any) -> Caller:
            gateway = await stack.enter_async_context(
                running_gateway(
                    kafka=kafka.kafka,
                    prefix=kafka.prefix,
                    postgres=database,
                    objects=f"file://{tmp_path}",
                    gateway_linger_s=600.0,
                    **more,
                )
            )
            for name, partitions in (("two", 2), ("one", 1)):
                await gateway.post("/types", {"name": name, "partitions": partitions})
            await wait_until(gateway.is_ready)
            return gateway

        yield start


async def release(kafka: Kafka, name: str, numbers: range) -> None:
    """Writes tasks to the ready topic, as task-sync does."""
    async with producing(kafka.kafka) as producer:
        for number in numbers:
            task = ReadyTask(Fence(number, 0, "start", 0), name, Context.encode(number), 60_000)
            partition = number % 2 if name == "two" else 0
            await producer.send(f"{kafka.prefix}ready.{name}", task.encode(), partition=partition)
        await producer.flush()


def hold_request(worker: str, name: str, **more: Any) -> dict[str, Any]:
    return {"worker": worker, "type": name, "wait_s": 30, **more}


async def held(gateway: Caller, worker: str, name: str, **more: Any) -> list[int]:
    answer = await gateway.post("/hold_task", hold_request(worker, name, **more))
    return [task["id"] for task in answer.body["tasks"]]


async def joined(kafka: Kafka, name: str, members: int) -> None:
    """Waits until the group is stable with this number of members."""

    async def is_stable() -> bool:
        try:
            async with admin_client(kafka) as admin:
                [answer] = await admin.describe_consumer_groups([workers_group(kafka.prefix, name)])
        except KafkaUnavailable:
            # A new broker has no coordinator until the first member joins a group.
            return False
        [(_error, _group, state, _kind, _protocol, found, *_)] = answer.groups
        return (state, len(found)) == ("Stable", members)

    await wait_until(is_stable)


@pytest.mark.parametrize("name", ["two", "one"])
async def test_a_busy_gateway_releases_records_to_an_idle_one(kafka: Kafka, start: Start, name: str) -> None:
    """T6: a gateway without idle workers releases its records and partitions to a gateway with an
    idle worker. The other gateway may have no partition before."""
    first, second = await start(), await start()
    await release(kafka, name, range(1, 101))
    [held_by_first] = await held(first, "slow", name)
    found: set[int] = set()
    async with asyncio.timeout(120):
        while len(found) < 99:
            found |= set(await held(second, "idle", name, max=10))
    assert found == set(range(1, 101)) - {held_by_first}


async def test_two_gateways_share_the_partitions(kafka: Kafka, start: Start) -> None:
    """T6: two gateways with workers deliver all tasks of both partitions, and each delivers some.

    A rebalance meanwhile delivers some twice, by design: a crowded machine causes one when a member
    misses its session timeout.
    """
    gateways = [await start(), await start()]
    shares: list[set[int]] = [set(), set()]

    async def work(number: int, worker: str) -> None:
        while len(shares[0] | shares[1]) < 100:
            shares[number] |= set(await held(gateways[number], worker, "two", wait_s=1))

    async with asyncio.TaskGroup() as workers:
        for number in (0, 1):
            for index in range(3):
                workers.create_task(work(number, f"w-{number}-{index}"))
        await joined(kafka, "two", 2)
        await release(kafka, "two", range(1, 101))
    assert shares[0] | shares[1] == set(range(1, 101))
    assert all(shares)


async def test_a_lone_gateway_keeps_its_records(
    kafka: Kafka, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6: a gateway that is the only member keeps its records, because leaving would only delay its
    workers."""
    counts, count = [], group_members.count

    async def counted(settings: Kafka, group: str) -> int:
        counts.append(await count(settings, group))
        return counts[-1]

    monkeypatch.setattr(group_members, "count", counted)
    gateway = await start(gateway_give_back_s=0.05)
    await release(kafka, "one", range(1, 6))
    assert await held(gateway, "w", "one") == [1]
    await wait_until(lambda: len(counts) >= 5)
    assert set(counts) == {1}
    assert await held(gateway, "w", "one", max=10) == [2, 3, 4, 5]


async def test_an_undeliverable_answer_is_handed_back(
    kafka: Kafka, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6: a client that disconnects between claim and answer costs its task no lease and no
    attempt. The gateway reports the task as handed back and ends its lease."""
    commit, may_commit = AIOKafkaConsumer.commit, asyncio.Event()
    requests: list[web.Request] = []
    read_body = hold.read_json

    async def slow_commit(self: AIOKafkaConsumer, offsets: Any) -> None:
        await may_commit.wait()
        await commit(self, offsets)

    async def recording_read(request: web.Request, **options: Any) -> Any:
        requests.append(request)
        return await read_body(request, **options)

    async def records(topic: str) -> list[Any]:
        return await read(kafka.kafka, kafka.prefix + topic)

    monkeypatch.setattr(AIOKafkaConsumer, "commit", slow_commit)
    monkeypatch.setattr(hold, "read_json", recording_read)
    gateway = await start()
    await release(kafka, "one", range(7, 9))
    poll = asyncio.ensure_future(gateway.post("/hold_task", hold_request("hasty", "one", max=2)))
    await wait_until(lambda: records(HEARTBEATS.name))
    poll.cancel()
    await wait_until(lambda: not hold._is_connected(requests[0]))
    may_commit.set()
    [report] = await wait_until(lambda: records(STAGE_RESULTS.name))
    assert report["worker"] == "hasty"
    assert [(r["id"], r["attempt"], r["outcome"]) for r in report["results"]] == [
        (7, 0, "retry"),
        (8, 0, "retry"),
    ]
    assert {r["error"]["kind"] for r in report["results"]} == {"HandedBack"}

    async def leases_ended() -> bool:
        heartbeats = await records(HEARTBEATS.name)
        return [(s["kind"], s["tasks"]) for s in heartbeats][1:] == [("release", [[7, 0, 0], [8, 0, 0]])]

    await wait_until(leases_ended)
    # The gateway continues to serve, and the next task is not affected.
    await release(kafka, "one", range(9, 10))
    assert await held(gateway, "patient", "one") == [9]


async def test_an_interrupted_answer_is_handed_back(kafka: Kafka, start: Start, tmp_path: Path) -> None:
    """T6: the tasks of an answer that is only partly sent are handed back."""
    gateway = await start()
    count = 8
    # References fit into one fetch; the answer has the contexts inline.
    long = await ObjectStore(f"file://{tmp_path}").check_in(
        Context(ContentType.TEXT, b"x" * 900_000), "default"
    )
    async with producing(kafka.kafka) as producer:
        tasks = [ReadyTask(Fence(n, 0, "start", 0), "one", long, 60_000) for n in range(1, count + 1)]
        for task in tasks:
            await producer.send(f"{kafka.prefix}ready.one", task.encode(), partition=0)
        await producer.flush()
    loop = asyncio.get_running_loop()
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.settimeout(0)
        # The buffer holds far less than the answer.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, (host, int(port)))
        body = orjson.dumps(hold_request("hasty", "one", max=count))
        head = f"POST /hold_task HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        await loop.sock_sendall(client, head.encode() + b"\r\n\r\n" + body)
        assert await in_time(loop.sock_recv(client, 12)) == b"HTTP/1.1 200"

    async def handed_back() -> list[int]:
        reports = await read(kafka.kafka, kafka.prefix + STAGE_RESULTS.name)
        return [entry["id"] for report in reports for entry in report["results"]]

    assert sorted(await wait_until(handed_back)) == list(range(1, count + 1))


async def test_long_polls_make_no_queries(kafka: Kafka, start: Start, database: str) -> None:
    """T6: while fifty workers of two types wait, no connection of the gateway begins a
    statement."""
    gateway = await start()
    watcher = await asyncpg.connect(database)
    began = (
        "SELECT pid, query_start FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'penstock gateway%' ORDER BY pid"
    )
    try:
        polls = [asyncio.ensure_future(held(gateway, f"w-{n}", "two" if n % 2 else "one")) for n in range(50)]
        await joined(kafka, "one", 1)
        await joined(kafka, "two", 1)

        async def fifty_short_polls() -> None:
            for _ in range(50):
                assert await held(gateway, "w", "one", wait_s=0.05) == []

        async def no_statement_began() -> bool:
            before = await watcher.fetch(began)
            assert before
            await fifty_short_polls()
            return await watcher.fetch(began) == before

        # The first round warms the caches. A round may meet a periodic statement of the gateway.
        await wait_until(no_statement_began)
        assert not any(poll.done() for poll in polls)
        await release(kafka, "one", range(1, 26))
        await release(kafka, "two", range(1, 26))
        assert sorted(task for found in await asyncio.gather(*polls) for task in found) == sorted(
            [*range(1, 26)] * 2
        )
    finally:
        await watcher.close()


async def test_a_registered_type_is_known_to_every_gateway_and_on_the_topic(
    start: Start, kafka: Kafka, database: str, tmp_path: Path
) -> None:
    """T2, T5: once `POST /types` is answered, another gateway and the topic take tasks of the type,
    while other types are registered and unknown ones are submitted."""
    first, second = await start(), await start()
    names = [f"new{number}" for number in range(20)]
    environment = {
        "kafka": kafka.kafka,
        "prefix": kafka.prefix,
        "postgres": database,
        "objects": f"file://{tmp_path}",
    }
    async with AsyncExitStack() as stack:
        task_sync = TaskSyncSettings(**environment)
        await stack.enter_async_context(running_service(create_app(task_sync)))
        producer = await stack.enter_async_context(producing(kafka.kafka))

        async def register_and_submit(name: str) -> list[int]:
            await second.post("/tasks", {"type": "nobody"})
            assert (await first.post("/types", {"name": name, "partitions": 1})).status == 201
            value = orjson.dumps({"type": name})
            await producer.send_and_wait(f"{kafka.prefix}submitted", value)
            return [(await second.post("/tasks", {"type": name})).status for _ in range(4)]

        statuses = await asyncio.gather(*map(register_and_submit, names))
        assert statuses == [[201] * 4] * len(names)
        pool = await stack.enter_async_context(open_pool(database, "test"))
        count = "SELECT count(*) FROM task WHERE type LIKE 'new%'"
        rejected = f"{kafka.prefix}submitted.rejected"

        async def settled() -> bool:
            return await pool.fetchval(count) + len(await read(kafka.kafka, rejected)) == 5 * len(names)

        await wait_until(settled, what="each submission is a task or is rejected")
        assert await pool.fetchval(count) == 5 * len(names)
