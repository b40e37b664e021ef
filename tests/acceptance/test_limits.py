"""Limits while task-sync is killed: counted from outside, on real processes."""

import asyncio
import os
import random
import signal
import sys
from contextlib import AsyncExitStack

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome, Tally, Verdict
from penstock.core.task import State
from penstock.postgres import advance, tasks, types
from penstock.postgres.connection import open_pool
from tests.running import make_topics
from tests.waiting import wait_until

TASKS = 150
MOST, MOST_PER_KEY = 7, 3
KILLS = 2


async def replica(stack, environment):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock",
        "run",
        "task-sync",
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
    )

    async def end():
        if process.returncode is None:
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    return process


async def sample(pool, seen):
    """Watches what is in flight, as anybody may, until cancelled."""
    while True:
        rows = await pool.fetch(
            "SELECT key, count(*) AS tasks FROM task WHERE state IN ('queued', 'running') GROUP BY key"
        )
        seen["samples"] += 1
        seen["type"] = max(seen["type"], sum(row["tasks"] for row in rows))
        seen["key"] = max(seen["key"], *(row["tasks"] for row in rows), 0)


async def work(pool, chance):
    """As workers that come and go: some of what is queued runs, some of it ends."""
    rows = await pool.fetch("SELECT id, state FROM task WHERE state IN ('queued', 'running')")
    some = [row for row in rows if chance.random() < 0.5]
    begun = [row["id"] for row in some if row["state"] == "queued" and chance.random() < 0.5]
    await pool.execute(
        "UPDATE task SET state = 'running', worker = 'w' WHERE id = ANY ($1::bigint[]) AND state = 'queued'",
        begun,
    )
    verdict = Verdict(State.SUCCEEDED, "start", 0, 0, 0.0, Tally())
    ended = [
        advance.Ending(
            fence=Fence(row["id"], 0, "start", 0), outcome=Outcome.DONE, verdict=verdict, worker="w"
        )
        for row in some
        if row["id"] not in begun
    ]
    if ended:
        await advance.advance(pool, ended)


async def test_limits_hold_while_their_owner_is_killed(kafka_servers, prefix, database, tmp_path):
    """S5, S7: with two replicas of which the owner is killed (-9) again and again, never more tasks are in flight than the
    type, or any key, may have; and all of them are released in the end."""
    await make_topics(kafka_servers, prefix)
    chance = random.Random(7)
    environment = {
        **os.environ,
        "PENSTOCK_KAFKA": kafka_servers,
        "PENSTOCK_PREFIX": prefix,
        "PENSTOCK_POSTGRES": database,
        "PENSTOCK_OBJECTS": f"file://{tmp_path}",
        "PENSTOCK_OWN_RETRY_S": "0.2",
        # Nobody reads the ready topic here: all of its records fit in the window.
        "PENSTOCK_WINDOW_FLOOR": str(10 * TASKS),
    }
    seen = {"samples": 0, "type": 0, "key": 0}
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        watching = await stack.enter_async_context(open_pool(database, "sampling"))
        wanted = types.TaskType(
            name="t", partitions=1, max_in_flight=MOST, max_per_key=MOST_PER_KEY, fair=True
        )
        await types.register(pool, wanted)
        await tasks.submit(
            pool,
            [Submission(type="t", key=f"k{n % 5}", context=Context.encode(n)) for n in range(TASKS)],
        )
        sampling = asyncio.create_task(sample(watching, seen))
        stack.callback(sampling.cancel)
        replicas = [await replica(stack, environment) for _ in range(2)]

        async def owners():
            return await pool.fetchval(
                "SELECT count(*) FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted"
                " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                " AND ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('penstock.release.t', 0)"
            )

        async def ended(count):
            await work(pool, chance)
            return await pool.fetchval("SELECT count(*) >= $1 FROM task WHERE state = 'succeeded'", count)

        for kill in range(1, KILLS + 1):
            await wait_until(lambda kill=kill: ended(kill * TASKS // (KILLS + 1)), timeout=60)
            assert await owners() == 1
            # Nobody tells which one it is: of two kills, the oldest each time, one strikes it.
            victim = replicas.pop(0)
            victim.send_signal(signal.SIGKILL)
            await victim.wait()
            replicas.append(await replica(stack, environment))
        await wait_until(lambda: ended(TASKS), timeout=60)
        assert not sampling.done(), sampling
    assert seen["samples"] > 100
    assert (seen["type"], seen["key"]) == (MOST, MOST_PER_KEY), "full, and never more than full"
