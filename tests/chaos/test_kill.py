"""Kill -9 of every service in turn, and of workers, in the middle of the work.

`make chaos` runs it with 10,000 tasks; `make test` with fewer.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import asyncpg
import orjson
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from penstock.checks.app import check
from penstock.local.deployment import Deployment, Options
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Platform
from tests.waiting import wait_until

TASKS = int(os.environ.get("PENSTOCK_CHAOS_TASKS", "1500"))
VICTIMS = ("task-sync", "worker", "stages", "heartbeats", "callbacks", "gateway", "worker")
# Every transition is asked for, so that the outbox has work in every transaction.
SUBMISSION = {"type": "count", "context": {"n": 0}, "events": "all"}


class Workers:
    """Worker processes that are started again when they are killed."""

    def __init__(self, deployment: Deployment, ledger: Path, count: int) -> None:
        self._command = [sys.executable, "-m", "tests.chaos.ledger_worker", str(ledger)]
        self._environment = {**os.environ, **deployment.environment}
        self._running = [self._start() for _ in range(count)]

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(self._command, env=self._environment)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kills one and starts another."""
        victim = self._running.pop(0)
        victim.send_signal(number)
        victim.wait()
        self._running.append(self._start())

    def stop(self) -> list[int]:
        """Stops all politely; returns their exit statuses."""
        for worker in self._running:
            worker.terminate()
        return [worker.wait() for worker in self._running]


@pytest.mark.slow
async def test_kill_each_service_in_turn(tmp_path):
    """O1, W4, design's guarantees 2, 3 and 6: whatever is killed, everything ends well, no stage takes effect
    twice, no event is lost, and the check is clean."""
    ledger = tmp_path / "ledger"
    # No default ports: others may be running here.
    options = Options(data_dir=tmp_path / "data", kafka_port=0, postgres_port=0, gateway_port=0)
    async with Deployment(options) as deployment:
        connection = await asyncpg.connect(deployment.postgres)
        async with open_pool(deployment.postgres, "test", size=1) as pool:
            # A short lease, so that a killed worker's tasks come back soon; enough tries for every kill.
            await types.register(
                pool,
                types.TaskType(
                    name="count", first_stage="one", lease_ms=5_000, max_attempts=20, retry_base_ms=100
                ),
            )
        workers = Workers(deployment, ledger, 2)
        try:
            await submit(deployment, TASKS)
            for number, victim in enumerate(VICTIMS):
                due = TASKS * 3 * (number + 1) // (len(VICTIMS) + 1)

                async def far_enough(due: int = due) -> bool:
                    return await connection.fetchval("SELECT count(*) FROM penstock.attempt") >= due

                await wait_until(far_enough, timeout=600, what=f"{due} attempts before {victim} is killed")
                if victim == "worker":
                    workers.kill()
                else:
                    deployment.kill(victim)

            async def all_ended() -> bool:
                return (
                    await connection.fetchval("SELECT count(*) FROM penstock.task WHERE finished_at IS NULL")
                    == 0
                )

            await wait_until(all_ended, timeout=600, what="every task has ended")
        finally:
            statuses = workers.stop()
        assert statuses == [0, 0], "a worker that was told to stop did not stop well"
        await verify(deployment, connection, ledger)
        await connection.close()


async def submit(deployment: Deployment, count: int) -> None:
    """Submits over the topic and returns when Kafka has every record."""
    producer = AIOKafkaProducer(bootstrap_servers=deployment.kafka, acks="all")
    await producer.start()
    topic = deployment.environment["PENSTOCK_PREFIX"] + "submitted"
    value = orjson.dumps(SUBMISSION)
    await asyncio.gather(*[await producer.send(topic, value) for _ in range(count)])
    await producer.stop()


async def verify(deployment: Deployment, connection: asyncpg.Connection, ledger: Path) -> None:
    """Counts effects, events and executions from outside."""
    states = dict(await connection.fetch("SELECT state, count(*) FROM penstock.task GROUP BY state"))
    assert states == {"succeeded": TASKS}, "T5: an acknowledged submission is neither lost nor doubled"
    results = await connection.fetch(
        "SELECT DISTINCT convert_from(result, 'UTF8') AS result FROM penstock.task"
    )
    assert [row["result"] for row in results] == ['{"n":3}'], "W4: each stage took effect exactly once"
    effects = Counter(
        (row["task_id"], row["step"])
        for row in await connection.fetch(
            "SELECT task_id, step FROM penstock.attempt WHERE outcome IN ('next', 'done')"
        )
    )
    assert len(effects) == 3 * TASKS
    assert set(effects.values()) == {1}

    settings = Platform.load(deployment.environment)

    async def clean() -> bool:
        return (await check(settings)).clean

    await wait_until(clean, timeout=120, what="penstock check is clean")

    # Events: each transition's id is there, some perhaps more than once, and nothing waits in the outbox.
    async def paid() -> bool:
        return await connection.fetchval("SELECT count(*) FROM penstock.outbox") == 0

    await wait_until(paid, timeout=120, what="the outbox is empty")
    seen = await read_events(deployment)
    told = Counter(seen.values())
    assert told["task.succeeded"] == TASKS, "C1: no transition goes untold"
    assert told["task.advanced"] == 2 * TASKS

    executions = [tuple(map(int, line.split())) for line in ledger.read_text().splitlines()]
    again = len(executions) - len({(task, step) for task, step, _attempt in executions})
    print(f"\n{TASKS} tasks, {len(executions)} executions of {3 * TASKS} stages: {again} run more than once")


async def read_events(deployment: Deployment) -> dict[str, str]:
    """Event names by id, of everything on the topic."""
    topic = deployment.environment["PENSTOCK_PREFIX"] + "events"
    consumer = AIOKafkaConsumer(bootstrap_servers=deployment.kafka, auto_offset_reset="earliest")
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, number) for number in range(8)]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        await consumer.seek_to_beginning(*partitions)
        seen: dict[str, str] = {}
        while any([await consumer.position(tp) < ends[tp] for tp in partitions]):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for record in records:
                    event = orjson.loads(record.value)
                    seen[event["id"]] = event["event"]
        return seen
    finally:
        await consumer.stop()
