"""Heartbeats: 100,000 running tasks of 1,000 simulated workers on one heartbeat processor.

    python -m benchmarks.heartbeats [--tasks 100000] [--workers 1000] [--lease 60] [--seconds 60]

A thousand of the SDK's heartbeat senders (`penstock.worker.heartbeat_sender`) run in one process,
with the deployment's broker and processor. After `seconds` of steady heartbeats a tenth of the
workers stops at once. The detection time of each of their tasks is measured from its last heartbeat
until its attempt expires.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import psutil
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.measurements import CpuMeter, percentile, report
from penstock.contracts.context import Context
from penstock.contracts.heartbeat import claims_of
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import HEARTBEATS
from penstock.local.deployment import SERVICES, Deployment, Options
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka
from penstock.worker.heartbeat_sender import HeartbeatSender
from penstock.worker.held_tokens import HeldTokens
from penstock.worker.kafka_transport import KafkaTransport

CLAIM_AT_A_TIME = 50  # workers


@dataclass
class WorkerPool:
    """Simulated workers that share one producer."""

    settings: Kafka
    producer: AIOKafkaProducer
    senders: list[HeartbeatSender] = field(default_factory=list)
    beating: list[asyncio.Task[None]] = field(default_factory=list)
    lost: int = 0

    async def join(self, name: str, tasks: list[ReadyTask]) -> None:
        """Adds a worker, which claims its tasks and begins to send heartbeats."""
        link = KafkaTransport(self.producer, self.settings, name, HeldTokens())
        sender = HeartbeatSender(link, name, time.monotonic, self._on_lost)
        heard_s = time.monotonic()
        claims = claims_of(name, tasks, {})
        for claim in claims:
            await link.send_heartbeat(claim)
        sender.add(claims, heard_s)
        self.senders.append(sender)
        self.beating.append(asyncio.create_task(sender.run()))

    def _on_lost(self, keys: list[object]) -> None:
        self.lost += len(keys)


async def prepare(connection: asyncpg.Connection, tasks: int, lease_ms: int) -> list[ReadyTask]:
    """Inserts tasks in the state after their release."""
    rows = await connection.fetch(
        "INSERT INTO penstock.task (type, state, stage, content_type, context)"
        " SELECT 'held', 'queued', 'start', 'json', 'null' FROM generate_series(1, $1) RETURNING id",
        tasks,
    )
    context = Context.encode(None)
    return [ReadyTask(Fence(row["id"], 0, "start", 0), "held", context, lease_ms) for row in rows]


async def records(settings: Kafka) -> int:
    """Returns the number of records on the heartbeats topic."""
    consumer = AIOKafkaConsumer(bootstrap_servers=settings.kafka)
    await consumer.start()
    topic = settings.prefix + HEARTBEATS.name
    ends = await consumer.end_offsets(
        [TopicPartition(topic, n) for n in range(partitions_of(settings, HEARTBEATS))]
    )
    await consumer.stop()
    return sum(ends.values())


async def measure(tasks: int, workers: int, lease_s: float, seconds: float) -> dict[str, float]:
    """Runs the workers, and loses a tenth of them; returns the figures of the report."""
    services = {name: service for name, service in SERVICES.items() if name == "heartbeats"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = Options(
            data_dir=Path(folder), services=services, kafka_port=0, postgres_port=0, gateway_port=0
        )
        async with Deployment(options) as deployment:
            settings = Kafka.load(deployment.environment)
            connection = await asyncpg.connect(deployment.postgres)
            async with open_pool(deployment.postgres, "benchmark", size=1) as pool:
                held = types.TaskType(
                    name="held", lease_ms=int(lease_s * 1000), retry_base_ms=3_600_000, retry_max_ms=3_600_000
                )
                await types.register(pool, held)
            ready = await prepare(connection, tasks, held.lease_ms)
            async with running(make_producer(settings)) as producer:
                simulated = WorkerPool(settings, producer)
                share = tasks // workers
                for begin in range(0, workers, CLAIM_AT_A_TIME):
                    names = range(begin, min(begin + CLAIM_AT_A_TIME, workers))
                    await asyncio.gather(
                        *(simulated.join(f"worker-{n}", ready[n * share : (n + 1) * share]) for n in names)
                    )
                while await in_state(connection, "running") < workers * share:
                    await asyncio.sleep(0.2)
                # One whole lease, so that every worker has sent heartbeats.
                await asyncio.sleep(lease_s)
                steady = await beat(deployment, settings, seconds)
                false = tasks - await in_state(connection, "running")
                late = await lose(simulated, connection, workers // 10, share)
                for beating in simulated.beating:
                    beating.cancel()
            await connection.close()
    return {**steady, "false expiries": false, "leases lost by workers": simulated.lost, **late}


async def run(tasks: int, workers: int, lease_s: float, seconds: float) -> int:
    """Measures and reports."""
    figures = await measure(tasks, workers, lease_s, seconds)
    false, lost = figures["false expiries"], figures["leases lost by workers"]
    worst = lease_s + 1 + 1
    return report(
        "heartbeats",
        {f"{tasks:,} tasks, {workers:,} workers, lease {lease_s:g} s": figures},
        {
            "no attempt with heartbeats expires": (
                f"{false} of {tasks:,}",
                false == lost == 0,
            ),
            f"lost workers detected within lease, tick and one second ({worst:g} s), p99": (
                f"{figures['found p99 (s)']}",
                figures["found p99 (s)"] <= worst,
            ),
        },
    )


async def in_state(connection: asyncpg.Connection, state: str) -> int:
    return await connection.fetchval("SELECT count(*) FROM penstock.task WHERE state = $1", state)


async def beat(deployment: Deployment, settings: Kafka, seconds: float) -> dict[str, float]:
    """Measures the cost of steady heartbeats."""
    pid = deployment.processes["heartbeats"]
    meter, before, begin = CpuMeter([pid]), await records(settings), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - begin
    return {
        "CPU of the processor (% of a core)": round(meter.seconds() / took * 100, 1),
        "memory (MiB)": round(psutil.Process(pid).memory_info().rss / 2**20),
        "records/s": round((await records(settings) - before) / took, 1),
    }


async def lose(
    simulated: WorkerPool, connection: asyncpg.Connection, workers: int, share: int
) -> dict[str, float]:
    """Stops workers; measures the seconds from each task's last heartbeat to its expiry."""
    contact_s: dict[int, float] = {}
    now_s, now = time.monotonic(), time.time()
    for sender, beating in zip(simulated.senders[:workers], simulated.beating[:workers], strict=True):
        beating.cancel()
        for queue in sender._queues.values():  # noqa: SLF001 (no public access, since only this benchmark needs it)
            attempts = queue._attempts.items()  # noqa: SLF001 (as above)
            contact_s |= {key[0]: now - (now_s - attempt.contact_s) for key, attempt in attempts}
    while await connection.fetchval("SELECT count(*) FROM penstock.attempt") < workers * share:
        await asyncio.sleep(0.2)
    rows = await connection.fetch(
        "SELECT task_id, extract(epoch FROM finished_at)::float8 AS at FROM penstock.attempt"
    )
    found = [row["at"] - contact_s[row["task_id"]] for row in rows]
    return {
        "found p50 (s)": round(percentile(found, 0.5), 2),
        "found p99 (s)": round(percentile(found, 0.99), 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--lease", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.tasks, arguments.workers, arguments.lease, arguments.seconds)))
