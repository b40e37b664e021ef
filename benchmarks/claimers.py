"""Workers that only claim: the load of `benchmarks.claims` and `benchmarks.gate`.

A process runs several workers:

    python -m benchmarks.claimers METHOD --type NAME --workers N --ready F --begin F --out F

It creates the file `ready` once its workers can claim, and waits for the file `begin`. It then
claims for the given seconds and writes a JSON list of [start, seconds, ids] to `out`. A worker
claims again as soon as the last claim has returned.

Methods: `kafka` claims as a Penstock worker does (poll, one claim record per poll, commit). The
others claim from the table: `lock` by FOR UPDATE, `skip` by FOR UPDATE SKIP LOCKED, `swap` by
compare and set of the state, `redis` under a lock in Redis.
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

from penstock.contracts.heartbeat import claims_of
from penstock.contracts.ready import MARKER, ReadyTask
from penstock.kafka.client.connection import make_consumer, make_producer, running
from penstock.kafka.topology.topics import ready as ready_topic
from penstock.kafka.topology.topics import workers_group
from penstock.local.deployment import Deployment
from penstock.settings import Platform
from penstock.worker.held_tokens import HeldTokens
from penstock.worker.kafka_transport import KafkaTransport

Claim = Callable[[], Awaitable[list[int]]]
# (start on the monotonic clock, seconds until the result, ids).
ClaimResult = tuple[float, float, list[int]]
PROCESSES = 4
SQL = Path(__file__).with_name("claims.sql")
# Seconds without a rebalance after which the consumer group counts as complete.
SETTLED_S = 3.0
# Seconds that a worker waits after an empty claim.
EMPTY_S = 0.005


def queries() -> dict[str, str]:
    """Returns the statements of claims.sql by name."""
    parts = SQL.read_text().split("-- name: ")[1:]
    return {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in parts}


async def claim(
    deployment: Deployment,
    method: str,
    type_name: str,
    *,
    workers: int,
    most: int,
    seconds: float,
    begin: Callable[[], Awaitable[None]],
    redis: str = "",
) -> list[ClaimResult]:
    """Runs workers in a few processes; returns the claims of all workers.

    Args:
        deployment: the deployment with the broker and the database.
        method: the method, see above.
        type_name: the task type.
        workers: number of workers: a multiple of the processes, or less.
        most: maximum tasks of one claim.
        seconds: duration.
        begin: awaited once all workers can claim.
        redis: socket of the Redis server.
    """
    processes = min(PROCESSES, workers)
    environment = {**os.environ, **deployment.environment}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.claimers", method,
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
                assert process.returncode is None, "a claimer process has ended early"
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
    """Claims as `penstock.worker.pull` does."""
    topic = settings.prefix + ready_topic(type_name, 1).name
    consumer = make_consumer(settings, workers_group(settings.prefix, type_name), topic, name=name)
    async with running(make_producer(settings)) as producer, running(consumer):
        held = HeldTokens()
        link = KafkaTransport(producer, settings, name, held)
        # Each later member causes a rebalance, so wait until the assignment is stable.
        shared, since_s = consumer.assignment(), time.monotonic()
        while not shared or time.monotonic() - since_s < SETTLED_S:
            await asyncio.sleep(0.05)
            if consumer.assignment() != shared:
                shared, since_s = consumer.assignment(), time.monotonic()

        async def poll() -> list[int]:
            fetched = await consumer.getmany(timeout_ms=1000, max_records=most)
            records = [record for some in fetched.values() for record in some if record.value != MARKER]
            tasks = [ReadyTask.decode(record.value) for record in records]
            if tasks:
                for task in tasks:
                    held.add(task)
                await asyncio.gather(*map(link.send_heartbeat, claims_of(name, tasks, {})))
                await consumer.commit()
            return [task.fence.id for task in tasks]

        yield poll


@asynccontextmanager
async def by_statement(
    dsn: str, method: str, type_name: str, name: str, most: int, redis_socket: str | None
) -> AsyncIterator[Claim]:
    """Claims from the table by SQL."""
    sql = queries()
    async with AsyncExitStack() as stack:
        # Like task-sync's releases: a claim that a server crash loses is repeated.
        options = {"jit": "off", "synchronous_commit": "off"}
        connection = await asyncpg.connect(dsn, server_settings=options)
        stack.push_async_callback(connection.close)

        async def claim_at_once() -> list[int]:
            return [row["id"] for row in await connection.fetch(sql[method], type_name, name, most)]

        async def look_and_swap() -> list[int]:
            found = [row["id"] for row in await connection.fetch(sql["look"], type_name, most)]
            return [row["id"] for row in await connection.fetch(sql["swap"], found, name)]

        if method != "redis":
            yield look_and_swap if method == "swap" else claim_at_once
            return

        from redis.asyncio import Redis  # noqa: PLC0415 (only this method needs it: benchmarks/requirements.txt)

        redis = await stack.enter_async_context(Redis(unix_socket_path=redis_socket))

        async def look_and_swap_alone() -> list[int]:
            async with redis.lock(f"claim.{type_name}", timeout=10, sleep=0.001):
                return await look_and_swap()

        yield look_and_swap_alone


async def work(ask: Claim, end_s: float, results: list[ClaimResult]) -> None:
    """Claims until `end_s`."""
    while (asked_s := time.monotonic()) < end_s:
        ids = await ask()
        results.append((asked_s, time.monotonic() - asked_s, ids))
        if not ids:
            await asyncio.sleep(EMPTY_S)


async def run(arguments: argparse.Namespace) -> None:
    """Runs all workers of this process."""
    results: list[ClaimResult] = []
    async with AsyncExitStack() as stack:
        names = [f"{arguments.name}.{number}" for number in range(arguments.workers)]
        if arguments.method == "kafka":
            settings = Platform.load()
            methods = [by_kafka(settings, arguments.type, name, arguments.most) for name in names]
        else:
            methods = [
                by_statement(
                    arguments.postgres,
                    arguments.method,
                    arguments.type,
                    name,
                    arguments.most,
                    arguments.redis,
                )
                for name in names
            ]
        claims = await asyncio.gather(*map(stack.enter_async_context, methods))
        arguments.ready.touch()
        while not arguments.begin.exists():
            await asyncio.sleep(0.01)
        end_s = float(arguments.begin.read_text()) + arguments.seconds
        workers = [asyncio.create_task(work(ask, end_s, results)) for ask in claims]
        # Cancels claims that still wait at the end, since a lock may take long.
        _done, late = await asyncio.wait(workers, timeout=max(0.0, end_s - time.monotonic()) + 2)
        for worker in late:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        arguments.out.write_bytes(orjson.dumps(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=("kafka", "lock", "skip", "swap", "redis"))
    parser.add_argument("--type", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--most", type=int, default=1, help="maximum tasks of one claim")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--begin", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--postgres", default="")
    parser.add_argument("--redis")
    uvloop.run(run(parser.parse_args()))
