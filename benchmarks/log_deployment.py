"""The part of `benchmarks.logs` that measures on a deployment, with `benchmarks.log_worker`."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks.log_worker import TYPES
from benchmarks.measurements import CpuMeter, percentile
from penstock.client import Client
from penstock.contracts.inbound_logs import decode_logs
from penstock.contracts.task_log import partition_of
from penstock.core.log_chunk import PLATFORM_SOURCE, Chunk, RunId
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology.topics import TASK_LOGS
from penstock.local.deployment import Deployment
from penstock.settings import Kafka
from penstock.worker.log_shipper import records_of

# The default of 30 s would make the benchmark wait.
SEGMENT_S = 5
SCREEN_LINES = 200
# All that a run keeps, in less than a burst.
SCREEN = {"lines": 9_800, "bytes": 1_060}
# The longest lines: as many bytes as one handler can log.
NOISY_BYTES = 16_000
STORED = (
    "SELECT coalesce(sum(lines), 0)::bigint, coalesce(sum(raw_size), 0)::bigint FROM penstock.log_segment"
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        calls: of `log.info`, in each of several rounds.
        burst_tasks: tasks of 9,900 lines each.
        seconds: of each steady load.
        raw_mb: that `tasklogs` stores.
        live_lines: that a follower receives.
        away_s: seconds without Kafka.
        tasks, rounds: of the throughput.
    """

    calls: int = 20_000
    burst_tasks: int = 40
    seconds: float = 20
    raw_mb: int = 200
    live_lines: int = 300
    away_s: float = 60
    tasks: int = 10_000
    rounds: int = 3


def sample_chunks(size_bytes: int) -> Iterator[Chunk]:
    """Chunks with lines of a usual kind, of at least so many bytes together."""
    rng = random.Random(1)
    task, size = 0, 0
    while size < size_bytes:
        task += 1
        lines = [
            (
                1785312000000 + task,
                20,
                "app.media",
                f"frame {n} of 3000: {rng.random():.6f} s, {rng.random()}",
            )
            for n in range(40)
        ]
        size += sum(len(line[3]) + 40 for line in lines)
        yield Chunk(RunId(10**9 + task, 0, 0, f"{task:x}"), "benchmark", 0, lines, "done")


class Logs:
    """The deployment that is measured.

    Args:
        deployment: it runs.
        client: of its gateway.
        connection: to its database.
        sizes: how much is measured.
    """

    def __init__(
        self, deployment: Deployment, client: Client, connection: asyncpg.Connection, sizes: Sizes
    ) -> None:
        self._deployment = deployment
        self._client = client
        self._connection = connection
        self._sizes = sizes
        self._settings = Kafka.load(deployment.environment)
        self._topic = self._settings.prefix + TASK_LOGS.name

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[int]:
        """A worker process; yields its id."""
        environment = {**os.environ, **self._deployment.environment, "PENSTOCK_TASK_LOGS": "only"}
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.log_worker"], env=environment)
        try:
            # It has joined all groups.
            for name in TYPES[:2]:
                await self._client.submit_and_wait(name, {"lines": 1, "bytes": 50, "rate": 1, "seconds": 0.1})
            yield process.pid
        finally:
            process.terminate()
            process.wait()

    async def lines_per_s(self, worker: int) -> dict[str, Any]:
        """Lines of handlers that log as fast as they can, until Kafka has them."""
        context = {"lines": 9_900, "bytes": 80}
        async with self._reading() as read:
            meter = CpuMeter([worker])
            tasks = await asyncio.gather(
                *(self._client.submit_and_wait("burst", context) for _ in range(self._sizes.burst_tasks))
            )
            began_s = min(task.result["began_s"] for task in tasks)
            logged_s = max(task.result["logged_s"] for task in tasks)
            ids = {task.id for task in tasks}
            kept, last_ms, ends = 0, 0, 0
            while ends < len(ids):
                for timestamp_ms, chunk in await read():
                    if chunk.run.task_id in ids:
                        kept += sum(line[2] != PLATFORM_SOURCE for line in chunk.lines)
                        last_ms = max(last_ms, timestamp_ms)
                        ends += chunk.end is not None
        cpu_s = meter.seconds()
        lines = context["lines"] * len(ids)
        return {
            "logged, lines/s": round(lines / (logged_s - began_s)),
            "on Kafka, lines/s": round(kept / (last_ms / 1000 - began_s)),
            "lines for each second of its CPU": round(kept / cpu_s),
            "dropped (%)": round(100 - 100 * kept / lines, 1),
        }

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[Any]:
        """Reads what is written to the topic from now on, when it is called."""
        consumer = AIOKafkaConsumer(bootstrap_servers=self._settings.kafka)
        await consumer.start()
        try:
            await consumer._client.force_metadata_update()  # noqa: SLF001 (the first one lacks new topics)
            numbers = consumer.partitions_for_topic(self._topic) or set()
            consumer.assign([TopicPartition(self._topic, number) for number in numbers])
            await consumer.seek_to_end()

            async def read() -> list[tuple[int, Chunk]]:
                found = await consumer.getmany(timeout_ms=500)
                return [
                    (record.timestamp, chunk)
                    for records in found.values()
                    for record in records
                    for chunk in decode_logs(record.value)
                ]

            yield read
        finally:
            await consumer.stop()

    async def share_of_a_core(self, worker: int) -> dict[str, float]:
        """Percent of a core for 1,000 lines a second, beside a handler that logs nothing."""
        used = {}
        for rate in (0, 1_000):
            meter = CpuMeter([worker])
            context = {"rate": rate, "seconds": self._sizes.seconds}
            await self._client.submit_and_wait("paced", context)
            used[rate] = meter.seconds() / self._sizes.seconds * 100
        return {"1,000 lines/s": used[1_000], "none": used[0], "difference": used[1_000] - used[0]}

    async def storing(self) -> dict[str, float]:
        """Megabytes that `tasklogs` stores for each second of its CPU."""
        values = []
        for number in range(8):
            size = self._sizes.raw_mb * 1_000_000 // 8
            chunks = [one for one in sample_chunks(8 * size) if partition_of(one.run.task_id, 8) == number]
            values += [(number, value) for value in records_of("benchmark", chunks)]
        await self._all_stored()
        before, meter = await self._stored(), CpuMeter([self._deployment.processes["tasklogs"]])
        async with running(make_producer(self._settings, compression="gzip")) as producer:
            count = len(await producer.partitions_for(self._topic))
            for number, value in values:
                await producer.send(self._topic, value, partition=number % count)
            await producer.flush()
        lines = sum(len(chunk.lines) for chunk in sample_chunks(self._sizes.raw_mb * 1_000_000))
        while (stored := await self._stored())[0] < before[0] + lines:
            await asyncio.sleep(0.2)
        raw_mb, cpu_s = (stored[1] - before[1]) / 1e6, meter.seconds()
        return {"raw MB": raw_mb, "CPU s": cpu_s, "MB/s a core": raw_mb / cpu_s}

    async def _stored(self) -> tuple[int, int]:
        row = await self._connection.fetchrow(STORED)
        return row[0], row[1]

    async def _all_stored(self) -> None:
        """Waits until no further lines come."""
        before, since_s = await self._stored(), time.monotonic()
        while time.monotonic() < since_s + 2.5 * SEGMENT_S:
            await asyncio.sleep(0.5)
            if (now := await self._stored()) != before:
                before, since_s = now, time.monotonic()

    async def latencies(self, lines: int, every_s: float) -> list[float]:
        """Milliseconds from a line to a follower, for lines of one task."""
        task = await self._client.submit("stamped", {"lines": lines, "every_s": every_s})
        found = [
            (time.time() - float(document["text"])) * 1000
            async for document in self._client.follow_log(task.id, 0, 0)
            if "text" in document
        ]
        # The first ones are as old as the follower is late.
        return found[3:]

    async def first_screen(self) -> dict[str, float]:
        """Milliseconds to a screen of a log of 10 MiB: the first and the last lines of it."""
        task = await self._client.submit_and_wait("burst", SCREEN)
        while (run := (await self._client.log_runs(task.id))[0])["bytes"] < 9.5 * 2**20:
            await asyncio.sleep(0.2)
        found: dict[str, float] = {"MiB": run["bytes"] / 2**20}

        async def measure(where: str) -> None:
            for name, query in (("first", {"limit": SCREEN_LINES}), ("last", {"tail": SCREEN_LINES})):
                times = []
                for _ in range(5):
                    begin_s = time.perf_counter()
                    lines = [line async for line in self._client.log_lines(task.id, 0, 0, **query)]
                    times.append((time.perf_counter() - begin_s) * 1000)
                    assert len(lines) == SCREEN_LINES
                found[f"{name} lines, {where} (ms)"] = median(times)

        await measure("on Kafka")
        await self._all_stored()
        await measure("stored")
        return found

    async def kafka_away(self, folder: Path) -> dict[str, float]:
        """Microseconds of a call of `log.info`, with Kafka and without it: p99."""
        context = {"until": str(folder / "until"), "file": str(folder / "calls")}
        waiting = asyncio.create_task(self._client.submit_and_wait("timed", context))
        broker = self._deployment.embedded_kafka
        assert broker is not None
        await asyncio.sleep(self._sizes.away_s / 3)
        begin_s = time.time()
        await broker.stop()
        await asyncio.sleep(self._sizes.away_s)
        end_s = time.time()
        (folder / "until").touch()
        await broker.start(timeout_s=120)
        await waiting
        calls = [tuple(map(float, line.split())) for line in (folder / "calls").read_text().splitlines()]
        there = [took_s * 1e6 for at_s, took_s in calls if at_s < begin_s]
        away = [took_s * 1e6 for at_s, took_s in calls if begin_s < at_s < end_s]
        return {
            "calls": len(away),
            "p99 with Kafka (µs)": percentile(there, 0.99),
            "p99 without (µs)": percentile(away, 0.99),
        }

    async def noisy_neighbour(self) -> dict[str, float]:
        """Milliseconds to followers of four tasks, beside one that logs at full speed."""
        seconds = self._sizes.seconds
        context = {"bytes": NOISY_BYTES, "seconds": seconds + 2}
        noisy = asyncio.create_task(self._client.submit_and_wait("noisy", context))
        quiet = await asyncio.gather(*(self.latencies(int(seconds * 4), 0.25) for _ in range(4)))
        found = [latency for latencies in quiet for latency in latencies]
        lines = (await noisy).result
        lost = await self._connection.fetchval(
            "SELECT count(*) FROM penstock.attempt WHERE outcome = 'expired'"
        )
        return {
            "logged by one (MB/s)": lines * NOISY_BYTES / 1e6 / (seconds + 2),
            "others' p50 (ms)": percentile(found, 0.5),
            "others' p99 (ms)": percentile(found, 0.99),
            "others' most (ms)": max(found),
            "leases lost": lost,
        }
