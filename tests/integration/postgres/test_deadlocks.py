"""Services change the same rows at once, each in an order of its own, on the real PostgreSQL."""

from __future__ import annotations

import asyncio
import random

import asyncpg
import pytest
from tests.support.waiting import in_time, wait_until

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.attempt import AttemptId
from penstock.core.completion import Conclusion, FailureCounts, Fence, Outcome
from penstock.core.leases import Lease
from penstock.core.task import State
from penstock.errors import LockConflict, Throttled
from penstock.gateway.batcher import SubmissionBatcher
from penstock.postgres import advance, callbacks, leases, release, tasks, types
from penstock.postgres.callbacks import OutcomeRow
from penstock.postgres.connection import open_pool, translated
from penstock.postgres.ending import Ending
from penstock.postgres.queries import bound, query
from penstock.postgres.session import open_session

ROUNDS = 60
TYPE = types.TaskType(name="t", partitions=1)
TASK_TYPES = (TYPE,)


async def deadlocks(database):
    """The deadlocks of a database, once all its sessions have ended and reported theirs."""
    name = database.partition("?")[0].rpartition("/")[2]
    connection = await asyncpg.connect(database.replace(f"/{name}", "/postgres", 1))
    try:

        async def alone():
            return not await connection.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = $1", name
            )

        await wait_until(alone, what="the sessions have ended")
        return await connection.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = $1", name)
    finally:
        await connection.close()


async def repeatedly(*actions):
    """Runs each action over and over, all at once, twice each."""

    async def run(action):
        for _ in range(ROUNDS):
            await action()

    await asyncio.gather(*(run(action) for action in (*actions, *actions)))


async def test_changes_of_tasks_do_not_deadlock(database):
    """S12: release, claims, results, cancellations and promotions of the same tasks, each batch in
    an order of its own, end without a deadlock."""
    random_ = random.Random(7)
    async with open_pool(database, "test", size=12) as pool, open_session(database, "owner") as session:
        await types.register(pool, TYPE)
        releasing = asyncio.Lock()

        async def submit():
            await tasks.submit(pool, [Submission(type="t", context=Context.encode(None))] * 30)

        async def sample(*states):
            rows = await pool.fetch(
                "SELECT id, step, stage, attempt FROM task WHERE state = ANY ($1) ORDER BY random() LIMIT 40",
                list(states),
            )
            return list(rows)

        async def let_go():
            async with releasing:
                await release.release(session, TYPE, 40, [])

        async def claim():
            rows = await sample("queued", "running")
            claims = [
                Lease(AttemptId(row["id"], row["step"], row["attempt"]), f"w{random_.random()}", 60.0, 0.0, 0)
                for row in rows
            ]
            await leases.claimed(pool, claims, [False] * len(claims))

        async def end():
            endings = [
                Ending(
                    fence=Fence(row["id"], row["step"], row["stage"], row["attempt"]),
                    outcome=Outcome.NEXT,
                    conclusion=Conclusion(
                        random_.choice((State.READY, State.SCHEDULED)),
                        "start",
                        row["step"] + 1,
                        0,
                        0.01,
                        FailureCounts(),
                    ),
                    worker="w",
                )
                for row in await sample("queued", "running")
            ]
            if endings:
                await advance.advance(pool, endings)

        async def cancel():
            await advance.cancel(
                pool, [row["id"] for row in (await sample("ready", "queued", "running"))[:5]]
            )

        async def promote():
            await pool.fetch(query("release.promote"), 20)

        async def mend():
            await pool.fetch(query("release.make_lost_ready"), "t", "3", 20)

        await submit()
        await repeatedly(submit, let_go, claim, end, cancel, promote, mend)
    assert await deadlocks(database) == 0


async def test_changes_of_callbacks_do_not_deadlock(database):
    """S12: claims, outcomes, postponements and replays of the same callbacks, each batch in an
    order of its own, end without a deadlock."""
    async with open_pool(database, "test", size=12) as pool:
        await types.register(pool, TYPE)
        await pool.execute(
            "INSERT INTO callback (id, target, task_id, body, due_at, ordered)"
            " SELECT 'msg_' || n, 'http://a/', n / 3, 'x', now(), true FROM generate_series(1, 60) AS n"
        )

        async def sample(state):
            return await pool.fetch(
                "SELECT id, attempt FROM callback WHERE state = $1 ORDER BY random() LIMIT 40", state
            )

        async def claim():
            found = [(row["id"], row["attempt"]) for row in await sample("pending")]
            await callbacks.claim(pool, found, horizon_s=60.0)

        async def claim_in_order():
            found = [(row["id"], row["attempt"]) for row in await sample("pending")]
            await callbacks.claim_in_order(pool, found, horizon_s=60.0)

        async def end():
            rows = [
                OutcomeRow(id=row["id"], attempt=row["attempt"], state="delivered")
                for row in await sample("pending")
            ]
            await callbacks.record_outcomes(pool, rows[:5])

        async def postpone():
            found = [(row["id"], row["attempt"]) for row in await sample("pending")]
            await callbacks.postpone(pool, found, [1.0] * len(found), [None] * len(found))

        async def replay():
            ids = [row["id"] for row in await sample("delivered")]
            count = len(ids)
            await pool.fetch(
                *bound(
                    "replay.replay",
                    id=ids,
                    due_in=[0.0] * count,
                    state="delivered",
                    namespace=["default"] * count,
                    target=["http://a/"] * count,
                )
            )

        await repeatedly(claim, claim_in_order, end, postpone, replay)
    assert await deadlocks(database) == 0


async def test_a_deadlock_is_repeated(database):
    """S12: a statement and a transaction that deadlock with an operator's transaction are repeated:
    they take effect, and no service sees an error."""
    name = database.partition("?")[0].rpartition("/")[2]
    operator = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    # The session that waits so long finds the deadlock, and its transaction ends: the operator's
    # waits last, and longer.
    await operator.execute(f"ALTER DATABASE \"{name}\" SET deadlock_timeout = '3s'")
    await operator.execute("SET deadlock_timeout = '60s'")
    async with open_pool(database, "test") as pool:
        await types.register(pool, TYPE)
        for change in (
            lambda ids: pool.execute("UPDATE task SET priority = 1 WHERE id = ANY ($1)", ids),
            lambda ids: advance.cancel(pool, ids),
        ):
            submissions = [Submission(type="t", context=Context.encode(None))] * 2
            first, second = (found.id for found in await tasks.submit(pool, submissions))
            async with operator.transaction():
                await operator.execute("UPDATE task SET priority = 0 WHERE id = $1", second)
                changing = asyncio.create_task(change([first, second]))

                async def waits():
                    return await operator.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted")

                await wait_until(waits, what="the statement waits for the operator")
                await operator.execute("UPDATE task SET priority = 0 WHERE id = $1", first)
            await changing
    await operator.close()


async def test_submissions_of_the_same_keys_do_not_fail(pool):
    """S12: two gateways submit the same idempotency keys in opposite orders. One that waits too
    long for the keys of another one has no effect, and its client repeats it. Each key has one
    task, and each submission is answered."""
    keys = [f"k{number}" for number in range(200)]
    gateways = [SubmissionBatcher(pool, 5.0, tasks.submit) for _ in range(2)]
    # Statements that wait for a connection would not overlap.
    opened = await asyncio.gather(*(pool.acquire() for _ in range(pool.get_max_size())))
    await asyncio.gather(*map(pool.release, opened))

    async def submit(gateway, keys):
        submissions = [
            Submission(type="t", context=Context.encode(None), idempotency_key=key) for key in keys
        ]
        # As clients do.
        found = await retry_until_available(
            lambda: gateway.submit(submissions), waiting_for="the submission", retry_on=(Throttled,)
        )
        return {key: task.id for key, task in zip(keys, found, strict=True)}

    results = await in_time(
        asyncio.gather(
            *(
                submit(gateway, order)
                for gateway, order in zip(gateways * 4, (keys, keys[::-1]) * 4, strict=True)
            )
        )
    )
    assert all(result == results[0] for result in results)
    assert await pool.fetchval("SELECT count(*) FROM task") == len(keys)


async def test_a_deadlock_of_submissions_ends_one_of_them(pool):
    """S12: of two submissions that wait for each other's keys, one has no effect and may be
    repeated, and the other one is inserted."""
    first, second = (
        [Submission(type="t", context=Context.encode(None), idempotency_key=key)] for key in ("a", "b")
    )

    async def submit(both, inserted):
        async with pool.acquire() as connection, connection.transaction():
            await tasks.submit(connection, both[0])
            await inserted.wait()
            return await tasks.submit(connection, both[1])

    inserted = asyncio.Barrier(2)
    outcomes = await in_time(
        asyncio.gather(
            submit((first, second), inserted), submit((second, first), inserted), return_exceptions=True
        )
    )
    conflicts = [outcome for outcome in outcomes if isinstance(outcome, LockConflict)]
    assert conflicts, outcomes
    assert all(isinstance(outcome, (LockConflict, list)) for outcome in outcomes), outcomes
    assert await pool.fetchval("SELECT count(*) FROM task") == 2 * (2 - len(conflicts))


async def test_a_lock_that_is_not_free_in_time_is_a_conflict(pool, database):
    """S12: a statement that waits too long for a lock fails as an unavailable server does, so that
    every caller tries again."""
    operator = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    async with operator.transaction():
        await operator.execute("LOCK TABLE task IN EXCLUSIVE MODE")
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute("SET LOCAL lock_timeout = '10ms'")
            with pytest.raises(LockConflict), translated():
                await connection.execute("UPDATE task SET priority = 0")
    await operator.close()
