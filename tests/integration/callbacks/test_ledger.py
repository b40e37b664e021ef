"""Ordered callbacks on a real PostgreSQL: races between a claim and its predecessor's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import asyncpg
import pytest
from tests.support.callback_targets import make_callback
from tests.support.waiting import wait_until

from penstock.callbacks.ledger import Ledger
from penstock.callbacks.receiver import InFlight
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import Callback
from penstock.postgres import callbacks
from penstock.postgres.callbacks import OutcomeRow
from penstock.postgres.connection import connect, open_pool
from penstock.postgres.outbox import callback_columns
from penstock.postgres.queries import bound, query

URL = "https://shop.example/hook"
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"


class Record:
    """A stand-in for a Kafka record."""

    topic, partition, settled = "callbacks", 0, False

    def settle(self) -> None:
        self.settled = True


@pytest.fixture
async def pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, "test") as made:
        yield made


@pytest.fixture
async def other_session(database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A second session."""
    connection = await connect(database, "test other")
    yield connection
    await connection.close()


@pytest.fixture
def ledger(pool: Pool) -> Ledger:
    return Ledger(CallbacksSettings(), pool, "test")


FIRST, SECOND = (make_callback(URL, 7, id=f"msg_7-{name}", ordered=True) for name in ("first", "second"))


async def enqueue(pool: Pool, *ordered: Callback) -> None:
    await pool.execute(*bound("outbox.enqueue_callbacks", **callback_columns(ordered, 60.0)))


async def due_in_s(pool: Pool, callback: Callback) -> float:
    found: float = await pool.fetchval(
        "SELECT extract(epoch FROM due_at - now())::float8 FROM callback WHERE id = $1", callback.id
    )
    return found


async def test_a_callback_whose_predecessor_ends_during_its_claim_is_due_at_once(
    pool: Pool, other_session: asyncpg.Connection[asyncpg.Record], ledger: Ledger
) -> None:
    """C11: the first callback ends after the claim has read it; the second is due at once."""
    await enqueue(pool, FIRST, SECOND)
    await callbacks.claim(pool, [(FIRST.id, 0)], horizon_s=30.0)
    async with other_session.transaction():
        # The transaction of `record_outcomes` is open, so the claim reads the first as pending.
        await other_session.execute(
            *bound(
                "callbacks.record_outcomes",
                id=[FIRST.id],
                attempt=[1],
                state=["delivered"],
                error=[None],
                due_in=[0.0],
                spent=[0],
                **{name: [] for name in ("row", "callback_id", "topic", "key", "value")},
            )
        )
        await other_session.execute(query("callbacks.requeue_next"), [FIRST.id])
        claiming = asyncio.create_task(ledger.claim([InFlight(SECOND, Record())]))
        await wait_until(
            lambda: pool.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )
    claimed = await claiming
    assert claimed.granted == []
    assert [in_flight.callback.id for in_flight in claimed.refused] == [SECOND.id]
    assert await due_in_s(pool, SECOND) <= 0
    assert claimed.requeued


async def test_a_callback_waits_for_its_predecessor(pool: Pool, ledger: Ledger) -> None:
    """C11: only the end of the first callback makes the second callback due."""
    await enqueue(pool, FIRST, SECOND)
    await callbacks.claim(pool, [(FIRST.id, 0)], horizon_s=30.0)
    claimed = await ledger.claim([InFlight(SECOND, Record())])
    assert len(claimed.refused) == 1
    assert await due_in_s(pool, SECOND) > 20
    assert not claimed.requeued
    await callbacks.record_outcomes(
        pool, [OutcomeRow(id=FIRST.id, attempt=1, state="delivered")], ordered={FIRST.id}
    )
    assert await due_in_s(pool, SECOND) <= 0


async def test_a_claim_returns_the_target_of_a_callback_held_for_order(pool: Pool, ledger: Ledger) -> None:
    """C4, issue 5: the claim reports the target of a callback that it holds.

    Without the report only the periodic search would find the target.
    """
    await enqueue(pool, FIRST, SECOND)
    await callbacks.hold(pool, [(FIRST.id, 0)], [None])
    claimed = await ledger.claim([InFlight(SECOND, Record())])
    assert await pool.fetchval("SELECT state FROM callback WHERE id = $1", SECOND.id) == "held"
    assert claimed.held_targets == {SECOND.target}
    assert ledger.held == 1


async def test_a_repeated_outcome_does_not_requeue_a_claimed_successor(pool: Pool) -> None:
    """C11: an outcome recorded twice leaves a claimed successor as it is.

    A lost answer from PostgreSQL makes the service record an outcome again.
    """
    await enqueue(pool, FIRST, SECOND)
    await callbacks.claim(pool, [(FIRST.id, 0)], horizon_s=30.0)
    end = [OutcomeRow(id=FIRST.id, attempt=1, state="delivered")]
    await callbacks.record_outcomes(pool, end, ordered={FIRST.id})
    claims = await callbacks.claim_in_order(pool, [(SECOND.id, 0)], horizon_s=30.0)
    assert claims.granted == {(SECOND.id, 0): 0}
    await callbacks.record_outcomes(pool, end, ordered={FIRST.id})
    assert await due_in_s(pool, SECOND) > 20
