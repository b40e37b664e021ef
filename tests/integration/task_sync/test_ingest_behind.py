"""Submissions while PostgreSQL is behind: the gateway refuses them, or they stay on their topic.
Each becomes one task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
from tests.support.gateways import Answer, Caller, running_gateway
from tests.support.services import producing, running_service
from tests.support.waiting import in_time, wait_until

from penstock.local.ports import choose_port
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

ROWS = 20
BATCH = 5


# An insert that waits, and for no lock: a submission does not wait long for one.
_SLOW_INSERTS = """
CREATE OR REPLACE FUNCTION penstock.wait_for_test() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WHILE NOT pg_try_advisory_xact_lock_shared(20) LOOP PERFORM pg_sleep(0.01); END LOOP;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER wait_for_test BEFORE INSERT ON penstock.task EXECUTE FUNCTION penstock.wait_for_test();
"""


@asynccontextmanager
async def inserts_blocked(database: str) -> AsyncIterator[None]:
    """Blocks every insert until the end of the block."""
    connection = await asyncpg.connect(database)
    try:
        await connection.execute(_SLOW_INSERTS)
        await connection.execute("SELECT pg_advisory_lock(20)")
        yield
    finally:
        await connection.close()


async def idempotency_keys(database: str) -> list[str]:
    connection = await asyncpg.connect(database)
    rows = await connection.fetch("SELECT idempotency_key FROM penstock.task")
    await connection.close()
    return sorted(row["idempotency_key"] for row in rows)


class Metrics:
    """Reads the metrics of a process."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._session = session

    async def get(self, name: str) -> float:
        async with self._session.get(self._url) as answer:
            lines = (await answer.text()).splitlines()
        [value] = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
        return float(value)


@asynccontextmanager
async def gateway_with_metrics(
    database: str, folder: Path, **options: Any
) -> AsyncIterator[tuple[Caller, Metrics]]:
    port = choose_port()
    async with running_gateway(
        # The gateway accepts tasks without Kafka.
        kafka="127.0.0.1:1",
        postgres=database,
        objects=f"file://{folder}",
        metrics_port=port,
        gateway_batch_limit=BATCH,
        **options,
    ) as gateway:
        await gateway.post("/types", {"name": "t"})
        yield gateway, Metrics(port, gateway.session)


async def blocked_submission(gateway: Caller, metrics: Metrics, for_s: float) -> asyncio.Future[Answer]:
    """A submission whose insert has been blocked for so long.

    On a busy machine the gateway refuses the first ones, because they get no connection in time.
    """
    first = asyncio.ensure_future(gateway.post("/tasks", batch(0)))

    async def is_blocked() -> bool:
        nonlocal first
        if first.done():
            assert first.result().status == 429
            first = asyncio.ensure_future(gateway.post("/tasks", batch(0)))
        return await metrics.get("penstock_submit_oldest_seconds") > for_s

    await wait_until(is_blocked)
    return first


async def accepted(gateway: Caller, submission: Any) -> int:
    """The status of a submission that the gateway accepts, sooner or later."""

    async def status() -> int:
        answer = (await gateway.post("/tasks", submission)).status
        return 0 if answer == 429 else answer

    return await wait_until(status)


def batch(number: int) -> list[dict[str, Any]]:
    return [{"type": "t", "idempotency_key": f"{number}-{index}"} for index in range(BATCH)]


async def test_a_gateway_refuses_submissions_beyond_its_queue(database: str, tmp_path: Path) -> None:
    """T5: while inserts are blocked, the gateway queues tasks up to its limit and answers other
    requests 429 with Retry-After at once. A refused request creates no task, and an acknowledged
    one creates each task once."""
    async with gateway_with_metrics(database, tmp_path, gateway_submit_rows=ROWS) as (gateway, metrics):

        async def submit(number: int) -> Answer:
            return await gateway.post("/tasks", batch(number))

        async with inserts_blocked(database):
            requests = [asyncio.ensure_future(submit(number)) for number in range(40)]
            await wait_until(lambda: sum(request.done() for request in requests) == 40 - ROWS // BATCH)
            assert await metrics.get("penstock_submit_waiting") == ROWS
            assert await metrics.get('penstock_submit_refused_total{why="rows"}') == 40 - ROWS // BATCH
            refused = [number for number, request in enumerate(requests) if request.done()]
            for number in refused:
                answer = requests[number].result()
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                assert answer.body["type"] == "urn:penstock:problem:throttled"
        answers = await asyncio.gather(
            *(request for number, request in enumerate(requests) if number not in refused)
        )
        assert {answer.status for answer in answers} == {201}
        accepted = {number for number in range(40) if number not in refused}
        assert await idempotency_keys(database) == sorted(
            submission["idempotency_key"] for n in accepted for submission in batch(n)
        )
        assert await metrics.get("penstock_submit_waiting") == 0
        for number in range(40):
            answer = await submit(number)
            assert answer.status == (200 if number in accepted else 201)
    assert await idempotency_keys(database) == sorted(
        submission["idempotency_key"] for n in range(40) for submission in batch(n)
    )


async def test_a_gateway_refuses_submissions_after_a_long_wait(database: str, tmp_path: Path) -> None:
    """T5: the gateway refuses submissions when the oldest has waited too long, however few are
    queued. Retry-After grows with that wait."""
    async with gateway_with_metrics(database, tmp_path, gateway_submit_wait_s=0.2) as (gateway, metrics):
        async with inserts_blocked(database):
            first = await blocked_submission(gateway, metrics, 1.5)
            answer = await gateway.post("/tasks", batch(1)[0])
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 2
            assert "behind" in answer.body["detail"]
            # Reads still work.
            assert (await gateway.get("/tasks")).status == 200
        assert (await first).status == 201
        assert await accepted(gateway, batch(1)[0]) == 201


async def test_a_full_gateway_reads_no_body(database: str, tmp_path: Path) -> None:
    """T5: a refused request costs no memory: the gateway answers before the client sends its
    body."""
    async with (
        gateway_with_metrics(database, tmp_path, gateway_submit_wait_s=0.2) as (gateway, metrics),
        inserts_blocked(database),
    ):
        first = await blocked_submission(gateway, metrics, 0.2)
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 8000000\r\n\r\n"
        )
        assert (await in_time(reader.readline())).startswith(b"HTTP/1.1 429 ")
        writer.close()
        assert not first.done()
    assert (await first).status == 201


@pytest.mark.parametrize("type_is_cached", [True, False])
async def test_a_submission_waits_briefly_for_a_connection(
    database: str, tmp_path: Path, *, type_is_cached: bool
) -> None:
    """T5: when other requests hold all connections, the gateway refuses submissions after a short
    wait, and creates no task."""
    async with gateway_with_metrics(database, tmp_path, gateway_submit_wait_s=0.5, gateway_connections=2) as (
        gateway,
        _,
    ):
        if type_is_cached:
            # A cached type needs no connection; its tasks need one.
            assert await accepted(gateway, batch(9)) == 201
        connection = await asyncpg.connect(database)
        async with connection.transaction():
            await connection.execute("LOCK TABLE penstock.task IN ACCESS EXCLUSIVE MODE")
            writers = [asyncio.ensure_future(gateway.post("/tasks/cancel", {"ids": [one]})) for one in (1, 2)]

            async def waiting() -> bool:
                query = (
                    "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'penstock.task'::regclass"
                    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                )
                return bool(await connection.fetchval(query) == 2)

            await wait_until(waiting)
            answer = await gateway.post("/tasks", batch(0))
            assert answer.status == 429
            # The gateway reads the types again when its cache is too old.
            expected = ("no connection", "could not be read") if type_is_cached else ("could not be read",)
            assert any(reason in answer.body["detail"] for reason in expected)
        await connection.close()
        assert {answer.status for answer in await asyncio.gather(*writers)} == {200}
    assert await idempotency_keys(database) == [
        submission["idempotency_key"] for submission in batch(9) if type_is_cached
    ]


@pytest.mark.declared_topics
async def test_ingest_pauses_partitions_and_resumes_them(
    where: dict[str, Any], kafka_servers: str, prefix: str, database: str
) -> None:
    """T5: while inserts are blocked, the consumer holds a bounded number of records and its metrics
    show paused partitions. Afterwards every record becomes one task, in the order of its
    partition."""
    async with open_pool(database, "test", size=1) as pool:
        await types.register(pool, types.TaskType(name="t", partitions=1))
    port, count = choose_port(), 500
    settings = TaskSyncSettings(**where, metrics_port=port, ingest_batch=10)
    async with running_service(create_app(settings)), aiohttp.ClientSession() as session:
        metrics = Metrics(port, session)
        async with inserts_blocked(database):
            async with producing(kafka_servers) as producer:
                for number in range(count):
                    value = f'{{"type": "t", "idempotency_key": "{number:03}"}}'.encode()
                    await producer.send(f"{prefix}submitted", value, partition=number % 4)
                await producer.flush()

            async def all_paused() -> bool:
                return await metrics.get("penstock_ingest_paused") == 4

            await wait_until(all_paused)
            # A partition pauses at two batches; the last fetch may add one.
            assert 4 * 20 <= await metrics.get("penstock_ingest_waiting") <= 4 * 30
            assert await metrics.get("penstock_ingest_processed_total") == 0

        async def all_ingested() -> bool:
            return await metrics.get("penstock_ingest_processed_total") == count

        await wait_until(all_ingested)
        assert (
            await metrics.get("penstock_ingest_waiting") == await metrics.get("penstock_ingest_paused") == 0
        )
    assert await idempotency_keys(database) == [f"{number:03}" for number in range(count)]
    connection = await asyncpg.connect(database)
    rows = await connection.fetch("SELECT idempotency_key AS key FROM penstock.task ORDER BY id")
    await connection.close()
    for partition in range(4):
        numbers = [int(row["key"]) for row in rows if int(row["key"]) % 4 == partition]
        assert numbers == sorted(numbers)
