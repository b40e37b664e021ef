"""Submissions beside a transaction that has changed a task and does not end."""

from __future__ import annotations

import asyncio
from itertools import zip_longest

import asyncpg
from tests.support.gateways import running_gateway
from tests.support.waiting import in_time

from penstock.client import Client
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.errors import LockConflict, Throttled, ValueRefused
from penstock.gateway.batcher import CONCURRENT_STATEMENTS, SubmissionBatcher
from penstock.postgres import tasks, types

TASK_TYPES = tuple(types.TaskType(name=name, paused=True) for name in ("mine", "other"))


async def test_a_locked_idempotency_key_delays_no_other_submission(where, pool):
    """O1: only submissions with the key of the changed task are refused, and may be repeated; as
    many of them as there are statements hold up no other one, also of the same statement."""
    async with (
        running_gateway(**where) as gateway,
        Client(gateway.url, patience_s=0) as impatient,
        Client(gateway.url) as client,
    ):
        first = await client.submit("mine", 1, idempotency_key="k")
        async with pool.acquire() as connection:
            change = connection.transaction()
            await change.start()
            await connection.execute("DELETE FROM task WHERE id = $1", first.id)
            again = [
                asyncio.create_task(impatient.submit("mine", 1, idempotency_key="k"))
                for _ in range(2 * CONCURRENT_STATEMENTS)
            ]
            others = [asyncio.create_task(client.submit("other", n)) for n in range(20)]
            done = await asyncio.gather(*others)
            assert len({task.id for task in done}) == 20
            refused = await asyncio.gather(*again, return_exceptions=True)
            assert {type(error) for error in refused} == {Throttled}, refused
            await change.rollback()
        assert (await client.submit("mine", 1, idempotency_key="k")).id == first.id


async def test_many_locked_keys_of_one_batch_delay_no_other_submission(database, pool):
    """O1: a hundred submissions with locked keys are refused, each for itself, and the others of
    their statement are inserted."""
    keyed = [
        Submission(type="mine", context=Context.encode(None), idempotency_key=f"k{number}")
        for number in range(100)
    ]
    free = [Submission(type="other", context=Context.encode(None)) for _ in range(10)]
    await tasks.submit(pool, keyed)
    other = await asyncpg.connect(database)
    try:
        await other.execute("BEGIN; DELETE FROM penstock.task")
        batcher = SubmissionBatcher(pool, 5.0, tasks.submit)
        answers = await in_time(
            asyncio.gather(
                *(batcher.submit([each]) for pair in zip_longest(keyed, free) for each in pair if each),
                return_exceptions=True,
            )
        )
    finally:
        await other.close()
    refused = [answer for answer in answers if isinstance(answer, Throttled)]
    created = [task.id for answer in answers if not isinstance(answer, BaseException) for task in answer]
    assert (len(refused), len(set(created))) == (100, 10), answers
    assert await pool.fetchval("SELECT count(*) FROM task WHERE type = 'other'") == 10


async def test_a_request_with_a_refused_value_and_a_locked_key_inserts_no_task(pool):
    """O1: a request that is answered with 429 has inserted no task. Its neighbours are, once."""
    await pool.execute("CREATE TABLE inserted (entry text)")

    async def insert(connection, entries):
        if "refused" in entries:
            raise ValueRefused("no such text")
        if "locked" in entries:
            raise LockConflict("another transaction has it")
        await connection.execute("INSERT INTO inserted SELECT unnest($1::text[])", list(entries))
        return list(entries)

    batcher = SubmissionBatcher(pool, 5.0, insert)
    answers = await asyncio.gather(
        batcher.submit(["a", "refused", "b", "locked"]), batcher.submit(["c"]), return_exceptions=True
    )
    assert isinstance(answers[0], Throttled), answers
    assert answers[1] == ["c"]
    assert [row["entry"] for row in await pool.fetch("SELECT entry FROM inserted")] == ["c"]
