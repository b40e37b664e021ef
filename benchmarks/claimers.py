"""Workers that claim and do nothing else: the load of `benchmarks.claims` and `benchmarks.gate`.

Some of them are one process:

    python -m benchmarks.claimers WAY --type NAME --workers N --ready FILE --begin FILE --out FILE

Each makes FILE `ready` once its workers could claim, waits for `begin`, claims for so many seconds, and writes to `out`
what it got: a JSON list of [asked at, seconds until it had them, ids]. A worker asks again as soon as it has been answered.

Ways: `kafka` as a Penstock worker does (poll, one claim record for the poll, commit); `lock`, `skip`, `swap` and `redis` on
the table: FOR UPDATE, FOR UPDATE SKIP LOCKED, compare and set of the state, and a select and update under a lock in Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import asyncpg
import orjson
import uvloop

from penstock.contracts.ready import MARK, ReadyTask
from penstock.kafka.connection import make_consumer, make_producer, running
from penstock.kafka.topics import ready as ready_topic
from penstock.kafka.topics import workers_group
from penstock.local.deployment import Deployment
from penstock.settings import Platform
from penstock.worker.hand import claims_of
from penstock.worker.link import Link

Claim = Callable[[], Awaitable[list[int]]]
# (asked at, seconds until it had them, ids), on the monotonic clock.
Told = tuple[float, float, list[int]]
PROCESSES = 4
SQL = Path(__file__).with_name("claims.sql")
# A group whose members have kept their partitions for so many seconds is complete.
SETTLED_S = 3.0
# A worker that finds nothing asks again after so many seconds.
NOTHING_S = 0.005


def queries() -> dict[str, str]:
    """The statements of claims.sql by name."""
    parts = SQL.read_text().split("-- name: ")[1:]
    return {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in parts}


async def claim(
    deployment: Deployment,
    way: str,
    type_name: str,
    *,
    workers: int,
    most: int,
    seconds: float,
    begin: Callable[[], Awaitable[None]],
    redis: str = "",
) -> list[Told]:
    """Has workers claim, in a few processes; returns what all of them were told.

    Args:
        deployment: where.
        way: see above.
        type_name: whose tasks.
        workers: a multiple of the processes, or fewer than these.
        most: tasks of one claim.
        seconds: for so long.
        begin: awaited once all workers could claim.
        redis: the socket of its server.
    """
    processes = min(PROCESSES, workers)
    environment = {**os.environ, **deployment.environment}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.claimers", way,
                "--type", type_name, "--workers", str(workers // processes), "--most", str(most),
                "--seconds", str(seconds), "--name", f"w{number}", "--begin", str(folder / "begin"),
                "--ready", str(folder / f"ready{number}"), "--out", str(folder / f"out{number}"),
                "--postgres", deployment.postgres, "--redis", redis,
                env=environment,
            )
            for number in range(processes)
        ]  # fmt: skip
        for number, process in enumerate(started):
            while not (folder / f"ready{number}").exists():
                assert process.returncode is None, "a claimer has ended early"
                await asyncio.sleep(0.05)
        (folder / "begin.unfinished").write_text(str(time.monotonic()))
        (folder / "begin.unfinished").rename(folder / "begin")
        await begin()
        for process in started:
            assert await process.wait() == 0
        outs = [orjson.loads((folder / f"out{number}").read_bytes()) for number in range(processes)]
    return [tuple(one) for out in outs for one in out]


@asynccontextmanager
async def by_kafka(settings: Platform, type_name: str, name: str, most: int) -> AsyncIterator[Claim]:
    """As `penstock.worker.pull` does it."""
    topic = settings.prefix + ready_topic(type_name, 1).name
    consumer = make_consumer(settings, workers_group(settings.prefix, type_name), topic, name=name)
    async with running(make_producer(settings)) as producer, running(consumer):
        link = Link(producer, settings, name)
        # Each that joins after it makes all of them share the partitions anew.
        shared, since_s = consumer.assignment(), time.monotonic()
        while not shared or time.monotonic() - since_s < SETTLED_S:
            await asyncio.sleep(0.05)
            if consumer.assignment() != shared:
                shared, since_s = consumer.assignment(), time.monotonic()

        async def poll() -> list[int]:
            fetched = await consumer.getmany(timeout_ms=1000, max_records=most)
            records = [record for some in fetched.values() for record in some if record.value != MARK]
            tasks = [ReadyTask.decode(record.value) for record in records]
            if tasks:
                await asyncio.gather(*map(link.send_heartbeat, claims_of(name, tasks, {})))
                await consumer.commit()
            return [task.fence.id for task in tasks]

        yield poll


@asynccontextmanager
async def by_statement(
    dsn: str, way: str, type_name: str, name: str, most: int, redis_socket: str | None
) -> AsyncIterator[Claim]:
    """On the table."""
    sql = queries()
    async with AsyncExitStack() as stack:
        # As task-sync's releases: a claim that a crash of the server undoes is made again.
        options = {"jit": "off", "synchronous_commit": "off"}
        connection = await asyncpg.connect(dsn, server_settings=options)
        stack.push_async_callback(connection.close)

        async def claim_at_once() -> list[int]:
            return [row["id"] for row in await connection.fetch(sql[way], type_name, name, most)]

        async def look_and_swap() -> list[int]:
            found = [row["id"] for row in await connection.fetch(sql["look"], type_name, most)]
            return [row["id"] for row in await connection.fetch(sql["swap"], found, name)]

        if way != "redis":
            yield look_and_swap if way == "swap" else claim_at_once
            return

        from redis.asyncio import Redis  # noqa: PLC0415 (only this way needs it: benchmarks/requirements.txt)

        redis = await stack.enter_async_context(Redis(unix_socket_path=redis_socket))

        async def look_and_swap_alone() -> list[int]:
            async with redis.lock(f"claim.{type_name}", timeout=10, sleep=0.001):
                return await look_and_swap()

        yield look_and_swap_alone


async def work(ask: Claim, end_s: float, told: list[Told]) -> None:
    """Claims until the end."""
    while (asked_s := time.monotonic()) < end_s:
        ids = await ask()
        told.append((asked_s, time.monotonic() - asked_s, ids))
        if not ids:
            await asyncio.sleep(NOTHING_S)


async def run(given: argparse.Namespace) -> None:
    """All workers of this process."""
    told: list[Told] = []
    async with AsyncExitStack() as stack:
        names = [f"{given.name}.{number}" for number in range(given.workers)]
        if given.way == "kafka":
            settings = Platform.load()
            ways = [by_kafka(settings, given.type, name, given.most) for name in names]
        else:
            ways = [
                by_statement(given.postgres, given.way, given.type, name, given.most, given.redis)
                for name in names
            ]
        claims = await asyncio.gather(*map(stack.enter_async_context, ways))
        given.ready.touch()
        while not given.begin.exists():
            await asyncio.sleep(0.01)
        end_s = float(given.begin.read_text()) + given.seconds
        workers = [asyncio.create_task(work(ask, end_s, told)) for ask in claims]
        # What is late to the end is broken off: a lock may be long in coming.
        _done, late = await asyncio.wait(workers, timeout=max(0.0, end_s - time.monotonic()) + 2)
        for worker in late:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        given.out.write_bytes(orjson.dumps(told))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("kafka", "lock", "skip", "swap", "redis"))
    parser.add_argument("--type", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--most", type=int, default=1, help="tasks of one claim")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--begin", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--postgres", default="")
    parser.add_argument("--redis")
    uvloop.run(run(parser.parse_args()))
