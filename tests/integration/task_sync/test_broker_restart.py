"""The broker is away and comes back: all types are released soon, however many there are."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from tests.support.services import make_topics, read_records, restarted_when_ended
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.errors import PenstockError
from penstock.local.broker import EmbeddedKafka
from penstock.local.ports import answers
from penstock.local.supervisor import Supervisor
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

pytestmark = pytest.mark.long

# Seconds from the broker's first answer until Kafka has a record of each type, on a busy machine.
WITHIN_S = 5.0
TYPES = 60


@pytest.fixture
async def broker():
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    supervisor = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    broker = EmbeddedKafka(supervisor, folder / "kafka")
    await broker.start(timeout_s=300.0)
    yield broker
    await asyncio.to_thread(supervisor.close)
    shutil.rmtree(folder)


async def written(broker, prefix, names, ready_s):
    """By type, when Kafka got its records, in seconds after `ready_s`; None until all have some."""
    found = []
    for name in names:
        records = await read_records(broker.servers, f"{prefix}ready.{name}")
        after_s = [record.timestamp / 1000 - ready_s for record in records]
        # The broker takes records a moment before it answers the test.
        found.append([at_s for at_s in after_s if at_s > -3])
    return found if all(found) else None


async def killed(broker):
    broker.kill()
    await wait_until(lambda: not answers(broker.port))  # its supervisor starts it again
    await broker.wait_ready()


async def stopped(broker):
    await broker.stop()
    await asyncio.sleep(25)  # the length of the outage
    await broker.start(timeout_s=300.0)


@pytest.mark.parametrize(
    "outage",
    [killed, stopped],
    ids=lambda each: each.__name__,
)
async def test_an_outage_of_the_broker_delays_no_type_for_long(broker, prefix, database, outage, capsys):
    """S1, S11, O1: the broker is killed and starts again at once, or is away for longer, while
    tasks of sixty types come. A few seconds after it answers, it has records of all types."""
    names = [f"t{number}" for number in range(TYPES)]
    await make_topics(broker.servers, prefix)
    settings = TaskSyncSettings(
        kafka=broker.servers, prefix=prefix, postgres=database, objects="memory:///", window_floor=1_000
    )
    ended = []

    def make():
        app = create_app(settings)

        async def service(stopping, ready):
            try:
                await app(stopping, ready)
            except PenstockError as error:
                ended.append(error)
                raise

        return service

    async with open_pool(database, "test") as pool:
        for name in names:
            await types.register(pool, types.TaskType(name=name, partitions=4))

        async def submit():
            drafts = [Submission(type=name, context=Context.encode(None)) for name in names]
            await tasks.submit(pool, drafts)

        async def keep_submitting():
            while True:
                await submit()
                await asyncio.sleep(0.5)  # the pace of the submissions

        async def queued():
            return await pool.fetchval(
                "SELECT count(DISTINCT type) = $1 FROM task WHERE state = 'queued'", TYPES
            )

        async with restarted_when_ended(make):
            await submit()
            await wait_until(queued, timeout=60)
            submitting = asyncio.create_task(keep_submitting())
            await outage(broker)
            ready_s = time.time()
            found = await wait_until(lambda: written(broker, prefix, names, ready_s), timeout=120, every=0.5)
            submitting.cancel()
            await asyncio.gather(submitting, return_exceptions=True)
    first = sorted(min(each) for each in found)
    with capsys.disabled():
        print(
            f"\nMEASURED {outage.__name__}, types {TYPES}: first {first[0]:.2f} s, last {first[-1]:.2f} s, ended {ended}"
        )
    assert first[-1] <= WITHIN_S
