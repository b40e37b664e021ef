"""No id is given twice, also after the database went back."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.pipeline import submit

from penstock.contracts.context import Context
from penstock.postgres import flow_starts
from penstock.postgres.connection import open_pool
from penstock.postgres.flow_starts import FlowStart
from penstock.postgres.types import TaskType, register

SEQUENCES = ("task_id_seq", "outbox_id_seq", "release_id_seq", "id_server", "id_ahead")
# Microseconds: the ids of an hour.
HOUR = 3600 * 1_000_000


async def snapshot(pool):
    """A copy as a replica or a backup has it: the last ids, and the last values of the
    sequences."""
    rows = {
        name: await pool.fetchval(f"SELECT coalesce(max(id), 0) FROM {name}") for name in ("task", "outbox")
    }
    return rows, {
        name: await pool.fetchrow(f"SELECT last_value, is_called FROM {name}") for name in SEQUENCES
    }


async def go_back(pool, to):
    """Makes the database what it was, as a restore or the promotion of a lagging replica does."""
    rows, sequences = to
    for name, last in rows.items():
        await pool.execute(f"DELETE FROM {name} WHERE id > $1", last)
    for name, (last, called) in sequences.items():
        await pool.execute("SELECT setval($1::text::regclass, $2, $3)", f"penstock.{name}", last, called)


async def test_ids_rise_and_are_exact_in_javascript(pool):
    """S3, O10: ids rise with the order of submission, also over many statements, and are below
    2^53."""
    found = [task_id for _ in range(50) for task_id in await submit(pool, 7)]
    assert found == sorted(set(found))
    assert found[-1] < 2**53


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.integers(1, 40), st.just("snapshot"), st.just("back")), max_size=12))
def test_property_no_id_is_given_twice(database, steps):
    """O10: batches, snapshots and returns to any of them, in any order: each id is given once."""

    async def play():
        async with open_pool(database, "test") as pool:
            await register(pool, TaskType(name="t"))
            given_ids, snapshots = set(), [await snapshot(pool)]
            for step in steps:
                if step == "snapshot":
                    snapshots.append(await snapshot(pool))
                elif step == "back":
                    await go_back(pool, snapshots[len(given_ids) % len(snapshots)])
                else:
                    found = await submit(pool, step)
                    assert not given_ids & set(found)
                    given_ids |= set(found)

    asyncio.run(play())


async def test_another_server_skips_ids_that_ran_ahead_of_its_clock(pool):
    """O10: the clock of the lost server was an hour ahead. The server that takes over gives none of
    the ids that were given after its last record, for tasks, outbox and releases."""
    await submit(pool, 1)
    for name in SEQUENCES[:3]:
        await pool.execute("SELECT setval($1::text::regclass, nextval($1::text::regclass) + $2)", name, HOUR)
    [last] = await submit(pool, 1)
    assert last > HOUR
    before = await snapshot(pool)
    lost = await submit(pool, 1000)
    assert lost == list(range(last + 1, last + 1001))
    await go_back(pool, before)
    # The replica has a process of its own, so its server started at another time.
    await pool.execute("SELECT setval('id_server', (SELECT last_value - 1 FROM id_server))")
    [first] = await submit(pool, 1)
    assert first > lost[-1]
    for name in ("outbox", "release"):
        after = await pool.fetchval(f"SELECT last_value FROM {name}_id_seq")
        assert after >= before[1][f"{name}_id_seq"]["last_value"] + 60 * 1_000_000


async def test_concurrent_batches_never_meet(pool):
    """O10: a session that waited to move the sequence does not move it back behind the ids that
    others take meanwhile."""
    often = """DO $$ BEGIN FOR _ IN 1..150 LOOP
        INSERT INTO outbox (keys, records) SELECT '{}', '{}' FROM generate_series(1, 20);
        PERFORM pg_sleep(0.001);
    END LOOP; END $$"""
    await asyncio.gather(*(pool.execute(often) for _ in range(8)))
    assert await pool.fetchval("SELECT count(*) FROM outbox") == 8 * 150 * 20


async def test_concurrent_submissions_never_meet(pool):
    """O10: many sessions give ids while the sequence is moved again and again; none is refused,
    none is equal to another."""
    first = await snapshot(pool)

    async def submit_often():
        return [task_id for _ in range(40) for task_id in await submit(pool, 3)]

    found = await asyncio.gather(*(submit_often() for _ in range(8)))
    every = [task_id for ids in found for task_id in ids]
    assert len(set(every)) == len(every) == 8 * 40 * 3
    assert all(ids == sorted(ids) for ids in found)
    locks = await pool.fetchval(
        "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database "
        "WHERE locktype = 'advisory' AND granted AND d.datname = current_database()"
    )
    assert locks == 0
    assert (await snapshot(pool))[1] != first[1]


async def test_no_task_has_the_id_of_a_flow(pool):
    """S3, F1: flows and tasks share one sequence, so an id, also that in a callback, names one of
    either: while both are inserted at once, with the statements of any batch, and after the
    database went back."""

    async def start_flows():
        given = FlowStart(name="f", version=1, unfinished=1, inputs=Context.encode({}))
        return [found.id for _ in range(20) for found in await flow_starts.start(pool, [given] * 3)]

    async def submit_tasks():
        return [task_id for _ in range(20) for task_id in await submit(pool, 3)]

    async def both():
        found = await asyncio.gather(start_flows(), submit_tasks(), start_flows(), submit_tasks())
        return [one for ids in found for one in ids]

    before = await snapshot(pool)
    first = await both()
    await go_back(pool, before)
    await pool.execute("DELETE FROM flow")
    given = [*first, *await both()]
    assert len(set(given)) == len(given) == 480
