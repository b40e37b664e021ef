"""Submissions while PostgreSQL is behind: refused or left on their topic, never piled up, and each taken once after all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
from tests.gateways import Answer, Caller, running_gateway
from tests.running import make_topics, producing, running_service
from tests.waiting import wait_until

from penstock.local.ports import choose_port
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

ROWS = 20
BATCH = 5


@asynccontextmanager
async def behind(database: str) -> AsyncIterator[None]:
    """Every insert waits until the end of the block."""
    connection = await asyncpg.connect(database)
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE penstock.task IN EXCLUSIVE MODE")
            yield
    finally:
        await connection.close()


async def keys(database: str) -> list[str]:
    connection = await asyncpg.connect(database)
    rows = await connection.fetch("SELECT idempotency_key FROM penstock.task")
    await connection.close()
    return sorted(row["idempotency_key"] for row in rows)


class Metrics:
    """What a process tells."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._session = session

    async def get(self, name: str) -> float:
        async with self._session.get(self._url) as answer:
            lines = (await answer.text()).splitlines()
        [value] = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
        return float(value)


@asynccontextmanager
async def a_gateway(database: str, folder: Path, **more: Any) -> AsyncIterator[tuple[Caller, Metrics]]:
    port = choose_port()
    async with running_gateway(
        # It takes tasks while Kafka is away.
        kafka="127.0.0.1:1",
        postgres=database,
        objects=f"file://{folder}",
        metrics_port=port,
        gateway_batch_limit=BATCH,
        **more,
    ) as gateway:
        await gateway.post("/types", {"name": "t"})
        yield gateway, Metrics(port, gateway.session)


def batch(number: int) -> list[dict[str, Any]]:
    return [{"type": "t", "idempotency_key": f"{number}-{each}"} for each in range(BATCH)]


async def test_a_gateway_refuses_what_it_could_only_pile_up(database: str, tmp_path: Path) -> None:
    """T5: while inserts stand still it holds as many tasks as it may and answers the others 429 with Retry-After at once; what
    was refused left nothing, and what was acknowledged, then or when it was sent again, is there exactly once."""
    async with a_gateway(database, tmp_path, gateway_submit_rows=ROWS) as (gateway, metrics):

        async def submit(number: int) -> Answer:
            return await gateway.post("/tasks", batch(number))

        async with behind(database):
            asked = [asyncio.ensure_future(submit(number)) for number in range(40)]
            await wait_until(lambda: sum(each.done() for each in asked) == 40 - ROWS // BATCH)
            assert await metrics.get("penstock_submit_waiting") == ROWS
            assert await metrics.get('penstock_submit_refused_total{why="rows"}') == 40 - ROWS // BATCH
            refused = [number for number, each in enumerate(asked) if each.done()]
            for number in refused:
                answer = asked[number].result()
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                assert answer.body["type"] == "urn:penstock:problem:throttled"
        answers = await asyncio.gather(*(each for number, each in enumerate(asked) if number not in refused))
        assert {answer.status for answer in answers} == {201}
        accepted = {number for number in range(40) if number not in refused}
        assert await keys(database) == sorted(one["idempotency_key"] for n in accepted for one in batch(n))
        assert await metrics.get("penstock_submit_waiting") == 0
        for number in range(40):
            answer = await submit(number)
            assert answer.status == (200 if number in accepted else 201)
    assert await keys(database) == sorted(one["idempotency_key"] for n in range(40) for one in batch(n))


async def test_a_gateway_refuses_when_the_oldest_has_waited_too_long(database: str, tmp_path: Path) -> None:
    """T5: PostgreSQL is behind when it answers late, however little waits; and Retry-After grows with that."""
    async with a_gateway(database, tmp_path, gateway_submit_wait_s=0.2) as (gateway, metrics):
        async with behind(database):
            first = asyncio.ensure_future(gateway.post("/tasks", batch(0)))

            async def late() -> bool:
                return await metrics.get("penstock_submit_oldest_seconds") > 1.5

            await wait_until(late)
            answer = await gateway.post("/tasks", batch(1)[0])
            assert (answer.status, answer.headers["Retry-After"]) == (429, "2")
            assert "behind" in answer.body["detail"]
            # Reading goes on.
            assert (await gateway.get("/tasks")).status == 200
        assert (await first).status == 201
        assert (await gateway.post("/tasks", batch(1)[0])).status == 201


async def test_no_body_is_read_while_there_is_no_room(database: str, tmp_path: Path) -> None:
    """T5: what is refused costs no memory: a client that has announced megabytes is answered before it sends any."""
    async with (
        a_gateway(database, tmp_path, gateway_submit_wait_s=0.2) as (gateway, metrics),
        behind(database),
    ):
        first = asyncio.ensure_future(gateway.post("/tasks", batch(0)))

        async def late() -> bool:
            return await metrics.get("penstock_submit_oldest_seconds") > 0.2

        await wait_until(late)
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 8000000\r\n\r\n"
        )
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 429 ")
        writer.close()
        assert not first.done()
    assert (await first).status == 201


@pytest.mark.parametrize("known", [True, False])
async def test_who_waits_for_a_connection_does_not_wait_for_long(
    database: str, tmp_path: Path, *, known: bool
) -> None:
    """T5: requests of other kinds may hold all connections; submissions are refused then, and nothing of them is done."""
    async with a_gateway(database, tmp_path, gateway_submit_wait_s=0.5, gateway_connections=2) as (
        gateway,
        _,
    ):
        if known:
            # A type that was read already needs no connection; its tasks do.
            assert (await gateway.post("/tasks", batch(9))).status == 201
        connection = await asyncpg.connect(database)
        async with connection.transaction():
            await connection.execute("LOCK TABLE penstock.task IN ACCESS EXCLUSIVE MODE")
            readers = [asyncio.ensure_future(gateway.get("/tasks")) for _ in range(2)]

            async def waiting() -> bool:
                query = (
                    "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'penstock.task'::regclass"
                )
                return bool(await connection.fetchval(query) == 2)

            await wait_until(waiting)
            answer = await gateway.post("/tasks", batch(0))
            assert answer.status == 429
            # A copy of the types that has grown old meanwhile is read again.
            expected = ("no connection", "no types") if known else ("no types",)
            assert any(reason in answer.body["detail"] for reason in expected)
        await connection.close()
        assert {answer.status for answer in await asyncio.gather(*readers)} == {200}
    assert await keys(database) == [one["idempotency_key"] for one in batch(9) if known]


async def test_a_topic_is_paused_and_read_on(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path
) -> None:
    """T5: while inserts stand still the consumer holds a bounded number of records and shows its partitions paused; after it
    every record becomes one task, in the order of its partition."""
    await make_topics(kafka_servers, prefix)
    async with open_pool(database, "test", size=1) as pool:
        await types.register(pool, types.TaskType(name="t", partitions=1))
    port, count = choose_port(), 500
    settings = TaskSyncSettings(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=database,
        objects=f"file://{tmp_path}",
        metrics_port=port,
        ingest_batch=10,
    )
    async with running_service(create_app(settings)), aiohttp.ClientSession() as session:
        metrics = Metrics(port, session)
        async with behind(database):
            async with producing(kafka_servers) as producer:
                for number in range(count):
                    value = f'{{"type": "t", "idempotency_key": "{number:03}"}}'.encode()
                    await producer.send(f"{prefix}submitted", value, partition=number % 4)
                await producer.flush()

            async def all_paused() -> bool:
                return await metrics.get("penstock_ingest_paused") == 4

            await wait_until(all_paused)
            # Two batches at which it pauses, and at most one that came with the last fetch.
            assert 4 * 20 <= await metrics.get("penstock_ingest_waiting") <= 4 * 30
            assert await metrics.get("penstock_ingest_taken_total") == 0

        async def all_taken() -> bool:
            return await metrics.get("penstock_ingest_taken_total") == count

        await wait_until(all_taken)
        assert (
            await metrics.get("penstock_ingest_waiting") == await metrics.get("penstock_ingest_paused") == 0
        )
    assert await keys(database) == [f"{number:03}" for number in range(count)]
    connection = await asyncpg.connect(database)
    rows = await connection.fetch("SELECT idempotency_key AS key FROM penstock.task ORDER BY id")
    await connection.close()
    for partition in range(4):
        mine = [int(row["key"]) for row in rows if int(row["key"]) % 4 == partition]
        assert mine == sorted(mine)
