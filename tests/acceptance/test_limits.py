"""Limits while task-sync is killed: an independent query counts tasks in flight, on real
processes."""

import asyncio
import os
import random
import signal
import sys
from contextlib import AsyncExitStack

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.completion import Conclusion, FailureCounts, Fence, Outcome
from penstock.core.task import State
from penstock.postgres import advance, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.ending import Ending
from tests.support.services import make_topics
from tests.support.waiting import wait_until

TASKS = 150
MAX_IN_FLIGHT, MAX_PER_KEY = 7, 3
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


async def sample(pool, maxima):
    """Records the maximum number of tasks in flight until cancelled."""
    while True:
        rows = await pool.fetch(
            "SELECT key, count(*) AS tasks FROM task WHERE state IN ('queued', 'running') GROUP BY key"
        )
        maxima["samples"] += 1
        maxima["type"] = max(maxima["type"], sum(row["tasks"] for row in rows))
        maxima["key"] = max(maxima["key"], *(row["tasks"] for row in rows), 0)


async def work(pool, rng):
    """Moves some tasks on, as workers do: some queued tasks start to run, some running ones end."""
    rows = await pool.fetch("SELECT id, state FROM task WHERE state IN ('queued', 'running')")
    chosen = [row for row in rows if rng.random() < 0.5]
    started = [row["id"] for row in chosen if row["state"] == "queued" and rng.random() < 0.5]
    await pool.execute(
        "UPDATE task SET state = 'running', worker = 'w' WHERE id = ANY ($1::bigint[]) AND state = 'queued'",
        started,
    )
    conclusion = Conclusion(State.SUCCEEDED, "start", 0, 0, 0.0, FailureCounts())
    ended = [
        Ending(fence=Fence(row["id"], 0, "start", 0), outcome=Outcome.DONE, conclusion=conclusion, worker="w")
        for row in chosen
        if row["id"] not in started
    ]
    if ended:
        await advance.advance(pool, ended)


async def test_limits_hold_while_their_owner_is_killed_repeatedly(kafka_servers, prefix, database, tmp_path):
    """S5, S7: two replicas run, and the owner is killed (-9) repeatedly. Tasks in flight never
    exceed the limits of the type and of any key, and all tasks are released in the end."""
    await make_topics(kafka_servers, prefix)
    rng = random.Random(7)
    environment = {
        **os.environ,
        "PENSTOCK_KAFKA": kafka_servers,
        "PENSTOCK_PREFIX": prefix,
        "PENSTOCK_POSTGRES": database,
        "PENSTOCK_OBJECTS": f"file://{tmp_path}",
        "PENSTOCK_OWN_RETRY_S": "0.2",
        # No worker reads the ready topic, so all of its records must fit in the window.
        "PENSTOCK_WINDOW_FLOOR": str(10 * TASKS),
    }
    maxima = {"samples": 0, "type": 0, "key": 0}
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        sampling_pool = await stack.enter_async_context(open_pool(database, "sampling"))
        task_type = types.TaskType(
            name="t", partitions=1, max_in_flight=MAX_IN_FLIGHT, max_per_key=MAX_PER_KEY, fair=True
        )
        await types.register(pool, task_type)
        await tasks.submit(
            pool,
            [Submission(type="t", key=f"k{n % 5}", context=Context.encode(n)) for n in range(TASKS)],
        )
        sampling = asyncio.create_task(sample(sampling_pool, maxima))
        stack.callback(sampling.cancel)
        replicas = [await replica(stack, environment) for _ in range(2)]

        async def owners():
            return await pool.fetchval(
                "SELECT count(*) FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted"
                " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                " AND ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('penstock.release.t', 0)"
            )

        async def ended(count):
            await work(pool, rng)
            return await pool.fetchval("SELECT count(*) >= $1 FROM task WHERE state = 'succeeded'", count)

        for kill in range(1, KILLS + 1):
            await wait_until(lambda kill=kill: ended(kill * TASKS // (KILLS + 1)))
            assert await owners() == 1
            # The owner is unknown. Killing the older replica twice kills the owner at least once.
            victim = replicas.pop(0)
            victim.send_signal(signal.SIGKILL)
            await victim.wait()
            replicas.append(await replica(stack, environment))
        await wait_until(lambda: ended(TASKS))
        assert not sampling.done(), sampling
    assert maxima["samples"] > 100
    assert (maxima["type"], maxima["key"]) == (MAX_IN_FLIGHT, MAX_PER_KEY), (
        "the limits are reached and never exceeded"
    )
