"""Starts of flows: one row each, however often a start is repeated."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.contracts.context import Context
from penstock.postgres.flow_starts import FlowStart, start
from penstock.postgres.queries import query


def start_of(**fields):
    return FlowStart(
        **{"name": "nightly", "version": 1, "unfinished": 1, "inputs": Context.encode({})} | fields
    )


async def test_a_repeated_start_returns_the_first_flow(pool):
    """F4: by idempotency key within a definition, or by the tick of a schedule."""
    tick = datetime(2026, 11, 23, tzinfo=UTC)
    batch = [
        start_of(idempotency_key="a"),
        start_of(),
        start_of(idempotency_key="a"),
        start_of(name="other", idempotency_key="a"),
        start_of(schedule="every-day", tick=tick),
        start_of(),
    ]
    first, plain, again, other, ticked, last = await start(pool, batch)
    assert (first.id, True, False) == (again.id, first.created, again.created)
    assert len({first.id, plain.id, other.id, ticked.id, last.id}) == 5
    assert plain.id < last.id
    [repeated, repeated_tick] = await start(pool, [batch[0], batch[4]])
    assert (repeated.id, repeated.created) == (first.id, False)
    assert (repeated_tick.id, repeated_tick.created) == (ticked.id, False)
    rows = await pool.fetch("SELECT root_id, flow_id, kind FROM flow_inbox ORDER BY flow_id")
    assert [tuple(row) for row in rows] == [
        (flow_id, flow_id, "began") for flow_id in sorted({first.id, plain.id, other.id, ticked.id, last.id})
    ]


async def test_a_key_that_becomes_free_meanwhile_starts_a_flow(pool):
    """F4: the flow of an idempotency key may move to history between the insertion that meets it
    and the look-up of its id. The key is free then."""
    batch = [start_of(idempotency_key="a"), start_of(), start_of(idempotency_key="a")]
    [old, _, _] = await start(pool, batch)

    class Moving:
        """Removes the flow before its id is looked up."""

        async def fetch(self, text, *arguments):
            if text == query("flows.by_idempotency_keys"):
                await pool.execute("DELETE FROM flow WHERE id = $1", old.id)
            return await pool.fetch(text, *arguments)

    first, plain, again = await start(Moving(), batch)
    assert old.id not in {first.id, plain.id, again.id}
    assert (first.created, plain.created, again.created) == (True, True, False)
    assert (first.id == again.id, plain.id != first.id) == (True, True)
