"""Callbacks in order: what may happen between the look at the one before and the word of its end; on a real PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import asyncpg
import pytest
from tests.callback_targets import owed
from tests.waiting import wait_until

from penstock.callbacks.lanes import Waiting
from penstock.callbacks.ledger import Ledger
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import Callback
from penstock.core.target import TargetId
from penstock.postgres import callbacks
from penstock.postgres.advance import callback_columns
from penstock.postgres.callbacks import Settled
from penstock.postgres.connection import connect, open_pool
from penstock.postgres.queries import query

URL = "https://shop.example/hook"
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"


class Record:
    """A record in hand."""

    topic, partition, settled = "callbacks", 0, False

    def settle(self) -> None:
        self.settled = True


class Written:
    """What a ledger tells of."""

    def __init__(self, pool: Pool) -> None:
        self.mine: list[str] = []
        self.others: list[str] = []
        self.held: set[TargetId] = set()
        self.due_s: list[float] = []
        self.ledger = Ledger(
            CallbacksSettings(),
            pool,
            None,  # type: ignore[arg-type]  # nothing here ends by itself
            scheduled=self._scheduled,
            begun=self._begun,
            held=self.held.update,
        )

    async def _scheduled(self, due_in_s: float) -> None:
        self.due_s.append(due_in_s)

    def _begun(self, mine: Any, others: Any) -> None:
        self.mine += [waiting.callback.id for waiting in mine]
        self.others += [waiting.callback.id for waiting in others]


@pytest.fixture
async def pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, "test") as made:
        yield made


@pytest.fixture
async def ended(database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Another session."""
    connection = await connect(database, "test other")
    yield connection
    await connection.close()


@pytest.fixture
async def written(pool: Pool) -> AsyncIterator[Written]:
    made = Written(pool)
    running = asyncio.create_task(made.ledger.run())
    yield made
    running.cancel()


FIRST, SECOND = (owed(URL, 7, id=f"msg_7-{name}", ordered=True) for name in ("first", "second"))


async def owe(pool: Pool, *owed_here: Callback) -> None:
    await pool.execute(query("outbox.owe_callbacks"), *callback_columns(owed_here, 60.0))


async def due_in_s(pool: Pool, callback: Callback) -> float:
    found: float = await pool.fetchval(
        "SELECT extract(epoch FROM due_at - now())::float8 FROM callback WHERE id = $1", callback.id
    )
    return found


async def test_one_whose_predecessor_ends_while_it_is_put_behind_comes_at_once(
    pool: Pool, ended: asyncpg.Connection[asyncpg.Record], written: Written
) -> None:
    """Issue 5: the end of the first, and its word to the second, come between the look and the update: the second is due."""
    await owe(pool, FIRST, SECOND)
    await callbacks.begin(pool, [(FIRST.id, 0)], horizon_s=30.0)
    async with ended.transaction():
        # What `settle` does, open still: whoever looks now sees the first under way.
        await ended.execute(query("callbacks.settle"), [FIRST.id], [1], ["delivered"], [None], [0.0], [0])
        await ended.execute(query("callbacks.follow"), [FIRST.id])
        written.ledger.begin(Waiting(SECOND, Record()))
        await wait_until(
            lambda: pool.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )
    await wait_until(lambda: written.others)
    assert written.mine == []
    assert await due_in_s(pool, SECOND) <= 0
    assert written.due_s == [0.0]


async def test_one_behind_another_under_way_waits(pool: Pool, written: Written) -> None:
    """Issue 5: the second look makes nothing due that has to wait, and the end of the first does."""
    await owe(pool, FIRST, SECOND)
    await callbacks.begin(pool, [(FIRST.id, 0)], horizon_s=30.0)
    written.ledger.begin(Waiting(SECOND, Record()))
    await wait_until(lambda: written.others)
    assert await due_in_s(pool, SECOND) > 20
    assert written.due_s == []
    await callbacks.settle(pool, [Settled(id=FIRST.id, attempt=1, state="delivered")], {FIRST.id})
    assert await due_in_s(pool, SECOND) <= 0


async def test_one_held_behind_another_is_told_of(pool: Pool, written: Written) -> None:
    """C4, issue 5: its target has something held from now on, which nobody would look for otherwise but now and then."""
    await owe(pool, FIRST, SECOND)
    await callbacks.hold(pool, [(FIRST.id, 0)], [None])
    record = Record()
    written.ledger.begin(Waiting(SECOND, record))
    await wait_until(lambda: record.settled)
    assert await pool.fetchval("SELECT state FROM callback WHERE id = $1", SECOND.id) == "held"
    assert written.held == {SECOND.target}
    assert written.ledger.held == 1


async def test_the_end_of_one_does_not_call_another_that_is_under_way(pool: Pool) -> None:
    """Issue 5: written down a second time, after a lost answer, it makes nothing due that has begun meanwhile."""
    await owe(pool, FIRST, SECOND)
    await callbacks.begin(pool, [(FIRST.id, 0)], horizon_s=30.0)
    end = [Settled(id=FIRST.id, attempt=1, state="delivered")]
    await callbacks.settle(pool, end, {FIRST.id})
    begun = await callbacks.begin_in_order(pool, [(SECOND.id, 0)], horizon_s=30.0)
    assert begun.turns == {(SECOND.id, 0): 0}
    await callbacks.settle(pool, end, {FIRST.id})
    assert await due_in_s(pool, SECOND) > 20
