"""HTTP workers of several gateways: who gets what, and what becomes of an answer that nobody is there to take."""

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
from tests.gateways import Caller, running_gateway
from tests.running import make_topics, producing, read
from tests.waiting import wait_until

from penstock.contracts.context import ContentType, Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.errors import KafkaUnavailable
from penstock.gateway import hold
from penstock.kafka import membership
from penstock.kafka.connection import admin_client, create_topics
from penstock.kafka.topics import HEARTBEATS, STAGE_RESULTS, ready, workers_group
from penstock.objects import ObjectStore
from penstock.settings import Kafka

Start = Any


@pytest.fixture
async def kafka(kafka_servers: str, prefix: str) -> Kafka:
    settings = await make_topics(kafka_servers, prefix)
    await create_topics(settings, [ready("two", 2), ready("one", 1)])
    return settings


@pytest.fixture
async def start(kafka: Kafka, database: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a gateway that would keep its partitions for as long as the test lasts if it only went by its linger."""
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
    """What task-sync does."""
    async with producing(kafka.kafka) as producer:
        for number in numbers:
            task = ReadyTask(Fence(number, 0, "start", 0), name, Context.encode(number), 60_000)
            partition = number % 2 if name == "two" else 0
            await producer.send(f"{kafka.prefix}ready.{name}", task.encode(), partition=partition)
        await producer.flush()


def asking(worker: str, name: str, **more: Any) -> dict[str, Any]:
    return {"worker": worker, "type": name, "wait_s": 30, **more}


async def held(gateway: Caller, worker: str, name: str, **more: Any) -> list[int]:
    answer = await gateway.post("/hold_task", asking(worker, name, **more))
    return [task["id"] for task in answer.body["tasks"]]


async def joined(kafka: Kafka, name: str, members: int) -> None:
    """Until so many share the group's partitions."""

    async def so() -> bool:
        try:
            async with admin_client(kafka) as admin:
                [answer] = await admin.describe_consumer_groups([workers_group(kafka.prefix, name)])
        except KafkaUnavailable:
            # A new broker has no coordinator until somebody has joined any group.
            return False
        [(_error, _group, state, _kind, _protocol, found, *_)] = answer.groups
        return (state, len(found)) == ("Stable", members)

    await wait_until(so)


@pytest.mark.parametrize("name", ["two", "one"])
async def test_what_a_gateway_without_idle_workers_has_goes_to_one_that_has_some(
    kafka: Kafka, start: Start, name: str
) -> None:
    """T6: a gateway whose only worker is at work keeps nothing from another's that is idle: neither what it had fetched
    nor what still lies in its partitions, also when the other had none."""
    first, second = await start(), await start()
    await release(kafka, name, range(1, 101))
    [mine] = await held(first, "slow", name)
    found: set[int] = set()
    async with asyncio.timeout(60):
        while len(found) < 99:
            found |= set(await held(second, "idle", name, max=10))
    assert found == set(range(1, 101)) - {mine}


async def test_each_of_two_gateways_with_workers_gets_its_share(kafka: Kafka, start: Start) -> None:
    """T6: neither hoards: of what is in as many partitions each hands out its half, and every task is handed out once."""
    gateways = [await start(), await start()]
    shares: list[list[int]] = [[], []]

    async def work(number: int, worker: str) -> None:
        while sum(map(len, shares)) < 100:
            shares[number] += await held(gateways[number], worker, "two", wait_s=1)

    async with asyncio.TaskGroup() as workers:
        for number in (0, 1):
            for each in range(3):
                workers.create_task(work(number, f"w-{number}-{each}"))
        await joined(kafka, "two", 2)
        await release(kafka, "two", range(1, 101))
    assert sorted(shares[0] + shares[1]) == list(range(1, 101))
    assert [len(share) for share in shares] == [50, 50]


async def test_a_gateway_that_is_alone_keeps_what_waits(
    kafka: Kafka, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6: with nobody to give it to, leaving would only make its workers wait for the next join."""
    looks, count = [], membership.count

    async def counted(settings: Kafka, group: str) -> int:
        looks.append(await count(settings, group))
        return looks[-1]

    monkeypatch.setattr(membership, "count", counted)
    gateway = await start(gateway_give_back_s=0.05)
    await release(kafka, "one", range(1, 6))
    assert await held(gateway, "w", "one") == [1]
    await wait_until(lambda: len(looks) >= 5)
    assert set(looks) == {1}
    assert await held(gateway, "w", "one", max=10) == [2, 3, 4, 5]


async def test_an_answer_that_nobody_is_there_to_take_is_handed_back(
    kafka: Kafka, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6: a client that has gone between its claim and its answer costs its task neither a lease nor a try: it is reported as
    handed back, and its lease is released."""
    commit, go_on = AIOKafkaConsumer.commit, asyncio.Event()
    requests: list[web.Request] = []
    read_body = hold.json_of

    async def slow_commit(self: AIOKafkaConsumer, offsets: Any) -> None:
        await go_on.wait()
        await commit(self, offsets)

    async def noted(request: web.Request, limit_bytes: int) -> Any:
        requests.append(request)
        return await read_body(request, limit_bytes)

    async def records(topic: str) -> list[Any]:
        return await read(kafka.kafka, kafka.prefix + topic)

    monkeypatch.setattr(AIOKafkaConsumer, "commit", slow_commit)
    monkeypatch.setattr(hold, "json_of", noted)
    gateway = await start()
    await release(kafka, "one", range(7, 9))
    asked = asyncio.ensure_future(gateway.post("/hold_task", asking("hasty", "one", max=2)))
    await wait_until(lambda: records(HEARTBEATS.name))
    asked.cancel()
    await wait_until(lambda: not hold._waits(requests[0]))
    go_on.set()
    [report] = await wait_until(lambda: records(STAGE_RESULTS.name))
    assert report["worker"] == "hasty"
    assert [(r["id"], r["attempt"], r["outcome"]) for r in report["results"]] == [
        (7, 0, "retry"),
        (8, 0, "retry"),
    ]
    assert {r["error"]["kind"] for r in report["results"]} == {"HandedBack"}

    async def released() -> bool:
        signs = await records(HEARTBEATS.name)
        return [(s["kind"], s["tasks"]) for s in signs][1:] == [("release", [[7, 0, 0], [8, 0, 0]])]

    await wait_until(released)
    # The gateway serves on, and what follows is nobody else's loss.
    await release(kafka, "one", range(9, 10))
    assert await held(gateway, "patient", "one") == [9]


async def test_a_long_answer_that_breaks_off_is_handed_back(
    kafka: Kafka, start: Start, tmp_path: Path
) -> None:
    """T6: also when its beginning was written: what a client has not got to the end of, it has not got."""
    gateway = await start()
    count = 8
    # By reference, so that one fetch brings them all; handed out they are inline.
    long = await ObjectStore(f"file://{tmp_path}").check_in(Context(ContentType.TEXT, b"x" * 900_000))
    async with producing(kafka.kafka) as producer:
        tasks = [ReadyTask(Fence(n, 0, "start", 0), "one", long, 60_000) for n in range(1, count + 1)]
        for task in tasks:
            await producer.send(f"{kafka.prefix}ready.one", task.encode(), partition=0)
        await producer.flush()
    loop = asyncio.get_running_loop()
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.settimeout(0)
        # Far less than the answer is on its way at once.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, (host, int(port)))
        body = orjson.dumps(asking("hasty", "one", max=count))
        head = f"POST /hold_task HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        await loop.sock_sendall(client, head.encode() + b"\r\n\r\n" + body)
        assert await asyncio.wait_for(loop.sock_recv(client, 12), 20) == b"HTTP/1.1 200"

    async def handed_back() -> list[int]:
        reports = await read(kafka.kafka, kafka.prefix + STAGE_RESULTS.name)
        return [entry["id"] for report in reports for entry in report["results"]]

    assert sorted(await wait_until(handed_back)) == list(range(1, count + 1))


async def test_many_long_polls_cost_the_database_nothing(kafka: Kafka, start: Start, database: str) -> None:
    """T6: while fifty workers of two types wait, none of the gateway's sessions begins a statement."""
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

        async def as_many_again() -> None:
            for _ in range(50):
                assert await held(gateway, "w", "one", wait_s=0.05) == []

        # Once for all that the first polls still had to ask, then again, one after the other, while the others wait.
        await as_many_again()
        before = await watcher.fetch(began)
        assert before
        await as_many_again()
        assert not any(poll.done() for poll in polls)
        assert await watcher.fetch(began) == before
        await release(kafka, "one", range(1, 26))
        await release(kafka, "two", range(1, 26))
        assert sorted(task for found in await asyncio.gather(*polls) for task in found) == sorted(
            [*range(1, 26)] * 2
        )
    finally:
        await watcher.close()
