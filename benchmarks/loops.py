"""The two loops that are compared, behind one interface."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import asyncpg
import orjson
from aiokafka import AIOKafkaProducer

from benchmarks import bare_loop
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import Topic
from penstock.local.deployment import Deployment, Options
from penstock.postgres import types as registry
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka


class Loop(Protocol):
    """A system that runs tasks of three no-op stages."""

    @property
    def pids(self) -> Sequence[int]:
        """Ids of all its processes, including the servers."""

    @property
    def starts(self) -> list[float]:
        """Seconds from submission to the first stage, per task."""

    async def submit(self, contexts: Sequence[dict[str, object]]) -> None:
        """Submits a batch of tasks."""

    async def finished(self) -> int:
        """Returns the number of succeeded tasks."""

    async def whole(self) -> list[float]:
        """Seconds from submission to the end, per task."""


@dataclass
class Bare:
    """The three processes of the bare loop, on the deployment's broker and database."""

    connection: asyncpg.Connection
    processes: list[subprocess.Popen]
    servers: list[int]
    log: Path

    @property
    def pids(self) -> Sequence[int]:
        return [*self.servers, *(process.pid for process in self.processes)]

    @property
    def starts(self) -> list[float]:
        return [float(line) for line in self.log.read_text().split()]

    async def submit(self, contexts: Sequence[dict[str, object]]) -> None:
        await self.connection.fetch(bare_loop.queries()["submit"], [orjson.dumps(c) for c in contexts])

    async def finished(self) -> int:
        return await self.connection.fetchval(bare_loop.queries()["finished"])

    async def whole(self) -> list[float]:
        return [row[0] for row in await self.connection.fetch(bare_loop.queries()["whole"])]


@asynccontextmanager
async def bare(deployment: Deployment) -> AsyncIterator[Bare]:
    """Starts the bare loop on a deployment without services."""
    connection = await asyncpg.connect(deployment.postgres)
    await connection.execute(bare_loop.queries()["create"])
    settings = Kafka(kafka=deployment.kafka, prefix="bare.")
    await create_topics(
        settings, [Topic("ready", 8, -1, ""), Topic("results", 8, -1, ""), Topic("claims", 8, -1, "")]
    )
    log = Path(tempfile.mkdtemp()) / "starts"
    command = [sys.executable, "-m", "benchmarks.bare_loop"]
    where = ["--kafka", deployment.kafka, "--postgres", deployment.postgres, "--prefix", "bare."]
    processes = [
        subprocess.Popen([*command, role, *where, *extra])
        for role, extra in (("sync", ()), ("worker", ("--log", str(log))), ("stages", ()))
    ]
    running = deployment.processes
    try:
        yield Bare(connection, processes, [running["kafka"], running["postgres"]], log)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        await connection.close()


@dataclass
class Whole:
    """Penstock: all services and worker processes."""

    deployment: Deployment
    connection: asyncpg.Connection
    producer: AIOKafkaProducer
    workers: Sequence[subprocess.Popen]
    types: Sequence[str]
    log: Path

    @property
    def pids(self) -> Sequence[int]:
        return [*self.deployment.processes.values(), *(worker.pid for worker in self.workers)]

    @property
    def starts(self) -> list[float]:
        return [float(line) for line in self.log.read_text().split()]

    async def submit(self, contexts: Sequence[dict[str, object]]) -> None:
        topic = self.deployment.environment["PENSTOCK_PREFIX"] + "submitted"
        sent = [
            await self.producer.send(topic, orjson.dumps({"type": type_, "context": context}))
            for type_, context in zip(itertools.cycle(self.types), contexts, strict=False)
        ]
        await asyncio.gather(*sent)

    async def finished(self) -> int:
        return await self.connection.fetchval("SELECT count(*) FROM penstock.task WHERE state = 'succeeded'")

    async def whole(self) -> list[float]:
        rows = await self.connection.fetch(
            "SELECT extract(epoch FROM finished_at)::float8"
            " - (convert_from(result, 'UTF8')::jsonb ->> 'at')::float8 FROM penstock.task ORDER BY id"
        )
        return [row[0] for row in rows]


@asynccontextmanager
async def whole(
    deployment: Deployment, workers: int = 1, types: Sequence[str] = ("noop",), lines: int = 0
) -> AsyncIterator[Whole]:
    """Starts workers for a deployment with services.

    Args:
        deployment: the deployment.
        workers: number of worker processes, each for all types.
        types: task types, which are submitted in turn.
        lines: that each stage logs.
    """
    log = Path(tempfile.mkdtemp()) / "starts"
    environment = {**os.environ, **deployment.environment}
    connection = await asyncpg.connect(deployment.postgres)
    producer = AIOKafkaProducer(bootstrap_servers=deployment.kafka, acks="all", max_batch_size=256 * 1024)
    await producer.start()
    async with open_pool(deployment.postgres, "benchmark", size=1) as pool:
        for name in types:
            await registry.register(pool, registry.TaskType(name=name, first_stage="one"))
    command = [
        sys.executable,
        "-m",
        "benchmarks.noop_worker",
        "--log",
        str(log),
        "--lines",
        str(lines),
        *types,
    ]
    processes = [subprocess.Popen(command, env=environment) for _ in range(workers)]
    try:
        yield Whole(deployment, connection, producer, processes, types, log)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        await producer.stop()
        await connection.close()


def servers_only(data_dir: Path) -> Options:
    """Options of a deployment with broker and database only."""
    return Options(data_dir=data_dir, services={}, kafka_port=0, postgres_port=0)


def everything(data_dir: Path) -> Options:
    """Options of a deployment with all services."""
    return Options(data_dir=data_dir, kafka_port=0, postgres_port=0, gateway_port=0)


async def finish(loop: Loop, count: int) -> None:
    """Waits until `count` tasks have succeeded."""
    while await loop.finished() < count:
        await asyncio.sleep(0.1)
