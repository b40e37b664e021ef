"""Ingest checks its stored position against the topic: every acknowledged record becomes a task."""

from contextlib import AsyncExitStack

from tests.support.services import write
from tests.support.state_faults import delete_records, recreate_topic
from tests.support.waiting import wait_until

from penstock.kafka.topology.topics import SUBMITTED


async def submit(system, name, count):
    """Writes records by their idempotency key, all to partition 0."""
    await write(
        system.where["kafka"],
        f"{system.where['prefix']}submitted",
        *({"type": "t", "idempotency_key": f"{name}-{n}"} for n in range(count)),
        partition=0,
    )


async def ingested(system, name, count):
    async def all_there():
        return await found(system, name) == count

    await wait_until(all_there, what=f"{count} tasks of {name}")


async def found(system, name):
    return await system.pool.fetchval("SELECT count(*) FROM task WHERE idempotency_key LIKE $1", f"{name}-%")


async def resets(system):
    rows = await system.pool.fetch("SELECT reason, stored, resumed, deleted FROM position_reset ORDER BY id")
    return [tuple(row) for row in rows]


async def test_a_recreated_topic_is_read_from_its_beginning(system, caplog):
    """Submissions to a topic that was deleted and created again while task-sync was down all become
    tasks, whether the new topic has fewer or more records than the old one."""
    for round_, (before, after) in enumerate([(20, 35), (20, 10)]):
        async with AsyncExitStack() as system.stack:
            await system.start("task-sync")
            await submit(system, f"old{round_}", before)
            await ingested(system, f"old{round_}", before)
        await recreate_topic(system.settings(), SUBMITTED)
        await submit(system, f"new{round_}", after)
        async with AsyncExitStack() as system.stack:
            await system.start("task-sync")
            await ingested(system, f"new{round_}", after)
        await recreate_topic(system.settings(), SUBMITTED)
    assert {reason for reason, *_ in await resets(system)} == {"replaced"}
    assert any(getattr(record, "event", "") == "position_moved" for record in caplog.records)


async def test_a_topic_recreated_under_a_running_ingest_is_read_from_its_beginning(system):
    """The same for a task-sync that runs all the time."""
    await system.start("task-sync")
    await submit(system, "old", 20)
    await ingested(system, "old", 20)
    await recreate_topic(system.settings(), SUBMITTED)
    await submit(system, "new", 35)
    await ingested(system, "new", 35)
    assert {reason for reason, *_ in await resets(system)} == {"replaced"}


async def test_deleted_records_are_counted_and_the_others_become_tasks(system):
    """Records that Kafka deleted before they were read are counted; all later ones become tasks."""
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync")
        await submit(system, "old", 10)
        await ingested(system, "old", 10)
    await submit(system, "lost", 7)
    await delete_records(system.settings(), SUBMITTED.name, {0: 17})
    await submit(system, "new", 5)
    async with AsyncExitStack() as system.stack:
        await system.start("task-sync")
        await ingested(system, "new", 5)
    assert await found(system, "lost") == 0
    assert await resets(system) == [("deleted", 10, 17, 7)]
