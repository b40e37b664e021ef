"""States of Kafka that its faults leave, made by hand: what the check says, and what the repair
does.

The table of docs/how-to/check-and-repair.md has them all; the other rows have tests of their own
(`test_misplaced`, `test_missing`, `test_unstamped`, `test_repair`).
"""

import pytest
from tests.integration.checks.test_checks import full_name, read_all, record, task
from tests.support.services import make_topics, write
from tests.support.state_faults import delete_records, expire_group_offsets, recreate_topic

from penstock.checks import in_transit
from penstock.checks.app import check
from penstock.checks.report import Rule
from penstock.kafka.connection import create_topics
from penstock.kafka.topics import ready, workers_group
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.settings import Platform

READY = ready("t", 2)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    monkeypatch.setattr(in_transit, "SETTLE_S", 1.0)
    monkeypatch.setattr(in_transit, "SEARCH_EVERY_S", 0.2)


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await create_topics(await make_topics(kafka_servers, prefix), [READY])
    return Platform(kafka=kafka_servers, prefix=prefix, postgres=database)


@pytest.fixture
async def released(settings):
    """A pool, and a task whose ready record no worker has read."""
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        task_id = await task(pool, state="'queued'")
        await write(settings.kafka, full_name(settings, READY.name), record(task_id), partition=0)
        assert (await check(settings)).clean
        yield pool, task_id


async def test_deleted_ready_records(settings, released):
    """O2b: the tasks are recordless; the repair makes them ready again, in the same attempt."""
    pool, task_id = released
    await delete_records(settings, READY.name, {0: -1})
    report = await check(settings, repair=True)
    assert report.counts == report.repaired == {Rule.RECORDLESS: 1}
    assert report.well
    row = await tasks.get(pool, task_id)
    assert (row["state"], row["attempt"]) == ("ready", 0)


async def test_a_recreated_ready_topic(settings, released):
    """O2b: the tasks are recordless; the repair makes them ready again. Kafka removes the offsets
    of the workers with the topic, at once or later."""
    pool, task_id = released
    await read_all(settings, workers_group(settings.prefix, "t"), READY.name)
    await recreate_topic(settings, READY)
    report = await check(settings, repair=True)
    assert report.counts[Rule.RECORDLESS] == report.repaired[Rule.RECORDLESS] == 1
    assert set(report.counts) <= {Rule.RECORDLESS, Rule.MISPLACED}
    assert report.well
    assert (await tasks.get(pool, task_id))["state"] == "ready"


@pytest.mark.usefixtures("released")
async def test_expired_offsets(settings):
    """O2b: the group reads from the beginning again, so no task is without a record: the check is
    clean."""
    group = workers_group(settings.prefix, "t")
    await read_all(settings, group, READY.name)
    await expire_group_offsets(settings, group)
    assert (await check(settings)).clean
