"""Logs that lost their tail: records on offsets that are used again are read.

A broker of its own is stopped, its files are cut, and it is started again.
"""

import shutil
from contextlib import AsyncExitStack

import pytest
from aiokafka import TopicPartition
from tests.support.memory_folder import make_folder
from tests.support.pipeline import System
from tests.support.services import make_topics, write
from tests.support.state_faults import copy_data, cut_tail, restore_data
from tests.support.waiting import wait_until

from penstock.local.broker import EmbeddedKafka
from penstock.local.supervisor import Supervisor
from penstock.postgres import types
from penstock.postgres.connection import open_pool


class Broker:
    """A broker whose data can be changed while it is stopped."""

    def __init__(self, kafka, data):
        self.kafka = kafka
        self.data = data
        self.copy = data.parent / "copy"

    async def cut(self, ends):
        """Cuts logs, by full name of the topic and partition."""
        await self.kafka.stop()
        for (topic, number), end in ends.items():
            cut_tail(self.data, TopicPartition(topic, number), end)
        await self.kafka.start(timeout_s=300.0)

    async def save(self):
        await self.kafka.stop()
        copy_data(self.data, self.copy)
        await self.kafka.start(timeout_s=300.0)

    async def restore(self):
        await self.kafka.stop()
        restore_data(self.data, self.copy)
        await self.kafka.start(timeout_s=300.0)


@pytest.fixture
async def broker():
    folder = make_folder()
    supervisor = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    try:
        kafka = EmbeddedKafka(supervisor, folder / "kafka")
        await kafka.start(timeout_s=300.0)
        yield Broker(kafka, folder / "kafka" / "data")
    finally:
        supervisor.close()
        shutil.rmtree(folder)


@pytest.fixture
async def system(broker, database):
    await make_topics(broker.kafka.servers, "p.")
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        yield System(broker.kafka.servers, "p.", database, stack, pool)


async def submit(system, name, count):
    await write(
        system.where["kafka"],
        "p.submitted",
        *({"type": "t", "idempotency_key": f"{name}-{n}"} for n in range(count)),
        partition=0,
    )


async def ingested(system, **counts):
    async def found():
        rows = await system.pool.fetch(
            "SELECT split_part(idempotency_key, '-', 1) AS name, count(*) AS tasks FROM task GROUP BY 1"
        )
        return {row["name"]: row["tasks"] for row in rows}

    async def so():
        return await found() == counts

    await wait_until(so, what=f"tasks are {counts}")


async def resets(system):
    rows = await system.pool.fetch("SELECT reason, stored, resumed FROM position_reset ORDER BY id")
    return [tuple(row) for row in rows]


async def test_submissions_on_offsets_that_are_used_again_become_tasks(broker, system):
    """Ingest reads on from where the tail was cut, even if the log has grown past its position."""
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync")
        await submit(system, "old", 20)
        await ingested(system, old=20)
    await broker.cut({("p.submitted", 0): 12})
    await submit(system, "new", 32)
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync")
        await ingested(system, old=20, new=32)
    assert await resets(system) == [("cut", 20, 12)]


async def test_a_tail_that_is_lost_again_before_a_record_was_read_is_noticed(broker, system):
    """T5: the position that follows a cut has an identity, too: a second cut below it is noticed,
    even if the log has grown past it."""

    async def told(*expected):
        async def so():
            return await resets(system) == list(expected)

        await wait_until(so, what=f"positions were moved: {expected}")

    async with AsyncExitStack() as system.stack:
        await system.start("task-sync", restarted=True)
        await submit(system, "old", 20)
        await ingested(system, old=20)
    await broker.cut({("p.submitted", 0): 12})
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync", restarted=True)
        await told(("cut", 20, 12))
    await broker.cut({("p.submitted", 0): 8})
    await submit(system, "new", 32)
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync", restarted=True)
        await ingested(system, old=20, new=32)
    assert await resets(system) == [("cut", 20, 12), ("cut", 12, 8)]


async def test_submissions_to_a_broker_that_was_restored_from_a_copy_become_tasks(broker, system):
    """A restored copy uses the leader epoch again: the checksum of the last record tells."""
    await submit(system, "first", 5)
    await broker.save()
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync")
        await submit(system, "old", 20)
        await ingested(system, first=5, old=20)
    await broker.restore()
    await submit(system, "new", 32)
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync")
        await ingested(system, first=5, old=20, new=32)
    assert await resets(system) == [("cut", 25, 5)]


async def test_running_services_survive_lost_tails(broker, system):
    """All services run on while every log loses its tail, and each later submission is done once,
    before and after the logs have grown past their old ends."""
    await system.start("task-sync", "heartbeats", "stages", restarted=True)
    await system.work(restarted=True)
    await submit(system, "old", 40)
    await system.become(succeeded=40)
    cut = {
        (topic, number): 2
        for topic, count in {
            "p.submitted": 4,
            "p.heartbeats": 4,
            "p.stage-results": 4,
            "p.ready.t": 2,
        }.items()
        for number in range(count)
    }
    await broker.cut({key: end for key, end in cut.items() if (broker.data / f"{key[0]}-{key[1]}").exists()})
    for round_ in range(2):
        await submit(system, f"new{round_}", 32)
        await system.become(succeeded=40 + 32 * (round_ + 1))
    assert set(system.executed.values()) == {1}
