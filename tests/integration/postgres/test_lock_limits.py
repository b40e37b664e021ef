"""Statements of submissions beside a transaction that has changed what they need, and goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import asyncpg
import pytest
from tests.support.waiting import in_time

from penstock.contracts.context import Context
from penstock.contracts.flow_submission import FlowEvent
from penstock.contracts.submission import Submission
from penstock.errors import LockConflict
from penstock.postgres import flow_events, flow_starts, task_logs, tasks, types
from penstock.postgres.ingest_positions import OffsetRange

TASK_TYPES = (types.TaskType(name="t", paused=True),)

SOURCE = OffsetRange("topic", 0, 0, 1)


@dataclass(frozen=True)
class Statement:
    """A statement of submissions.

    Attributes:
        insert: inserts one with the idempotency key `k`, from an optional source.
        change: what another transaction does to the first one with this key.
    """

    insert: Callable[[Any, OffsetRange | None], Awaitable[Any]]
    change: str = ""


async def insert_task(pool, source):
    task = Submission(type="t", context=Context.encode(None), idempotency_key="k")
    return await tasks.submit(pool, [task], source)


async def insert_flow(pool, source):
    flow = flow_starts.FlowStart(
        name="f", version=1, unfinished=1, inputs=Context.encode({}), idempotency_key="k"
    )
    return await flow_starts.start(pool, [flow], source)


async def insert_event(pool, source):
    event = FlowEvent(id="k", event="paid", key="1", data=Context.encode(None))
    return await flow_events.deliver(pool, [event], source)


async def insert_segment(pool, source):
    await task_logs.insert(pool, source, None, None, 1)


STATEMENTS = {
    "task": Statement(insert_task, "DELETE FROM task"),
    "flow": Statement(insert_flow, "DELETE FROM flow"),
    "event": Statement(insert_event, "DELETE FROM flow_event"),
    "segment": Statement(insert_segment),
}


@pytest.fixture
async def other(database):
    """A connection of another program, in a transaction."""
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    transaction = connection.transaction()
    await transaction.start()
    yield connection
    await connection.close()


KEYED = {name: statement for name, statement in STATEMENTS.items() if statement.change}


@pytest.mark.parametrize("statement", KEYED.values(), ids=KEYED)
async def test_a_locked_idempotency_key_is_not_waited_for(pool, other, statement):
    """S12: the statement of a submission ends while another transaction has the first submission of
    its key, and has no effect."""
    await statement.insert(pool, None)
    await other.execute(statement.change)
    with pytest.raises(LockConflict):
        await in_time(statement.insert(pool, None))


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
async def test_a_locked_position_is_not_waited_for(pool, other, statement):
    """S12: the statement of a batch ends while another transaction has the position of its
    partition, and moves no position. Afterwards it does."""
    await pool.execute("INSERT INTO ingested (topic, partition, next_offset) VALUES ('topic', 0, 0)")
    await other.execute("SELECT FROM ingested WHERE topic = 'topic' FOR UPDATE")
    with pytest.raises(LockConflict):
        await in_time(statement.insert(pool, SOURCE))
    await other.close()
    await statement.insert(pool, SOURCE)
    assert await pool.fetchval("SELECT next_offset FROM ingested") == 1
    # A second position of the same statement: the limit is not one of the connection.
    assert await pool.fetchval("SELECT current_setting('lock_timeout')") == "0"
    await statement.insert(pool, replace(SOURCE, first=1, following=2))


@pytest.mark.parametrize("statement", KEYED.values(), ids=KEYED)
async def test_submissions_that_wait_for_each_other_end_at_different_times(pool, statement):
    """S12: each submission has a limit of its own, about half a second. Two submissions that wait
    for each other's keys would otherwise both end, and again when both are repeated."""
    limits = set()
    for _ in range(5):
        async with pool.acquire() as connection, connection.transaction():
            await statement.insert(connection, None)
            limits.add(await connection.fetchval("SELECT current_setting('lock_timeout')"))
    assert len(limits) > 1, limits
    assert all(400 <= int(limit.removesuffix("ms")) < 600 for limit in limits), limits
