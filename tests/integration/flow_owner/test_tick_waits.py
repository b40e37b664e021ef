"""A node waits for the run of another flow of the same schedule tick."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import orjson
import pytest
from tests.integration.flow_owner.support import Owner, definition, task

from penstock.postgres.flow_starts import match_runs

TICK = datetime(2026, 11, 23, 2, 30, tzinfo=UTC)

LOAD = definition("load", nodes={"work": task()}, output='{"rows": nodes.work.output}')
REPORT = definition(
    "report",
    nodes={
        "loaded": {"kind": "wait", "flow": "load", "tick": "same"},
        "write": task(
            "loaded", input='{"rows": nodes.loaded.output.rows, "tick": flow.tick, "by": flow.schedule}'
        ),
    },
)


@pytest.fixture
async def owner(pool):
    owner = Owner(pool)
    await owner.define(LOAD, REPORT)
    return owner


def load(owner, tick=TICK, **fields):
    return owner.start(LOAD, schedule="loads", tick=tick, **fields)


def report(owner, tick=TICK):
    return owner.start(REPORT, schedule="reports", tick=tick)


async def work(owner, flow_id, state="succeeded", result=None):
    [each] = await owner.tasks(flow_id)
    await owner.end(each, state, result)
    await owner.advance()


@pytest.mark.parametrize("first", ["load", "report"])
async def test_the_wait_ends_with_the_run_before_or_after_it(owner, first):
    """F4: the run of the same tick, with its output; the run of another tick ends nothing."""
    other = await load(owner, TICK - timedelta(days=1))
    if first == "report":
        waiting = await report(owner)
        await owner.advance()
    loading = await load(owner)
    await owner.advance()
    await work(owner, other, result=0)
    if first == "report":
        assert not await owner.tasks(waiting)
    await work(owner, loading, result=5)
    if first == "load":
        waiting = await report(owner)
        await owner.advance()
    [write] = await owner.tasks(waiting)
    assert orjson.loads(write["context"]) == {"rows": 5, "tick": "2026-11-23T02:30:00Z", "by": "reports"}
    assert await match_runs(owner.pool) == 0


async def test_a_run_that_does_not_succeed_fails_the_node_and_a_recovery_waits_again(owner):
    """F3, F4: also a cancelled run; a recovery sees how the latest run has ended since."""
    loading, waiting = await load(owner), await report(owner)
    await owner.advance()
    await work(owner, loading, "failed")
    flow = await owner.flow(waiting)
    assert flow["status"] == "failed"
    assert f"flow {loading}, which it waited for, failed" in flow["error"]
    # The latest run of the tick counts, and it is still running.
    again = await load(owner, rerun_of=loading)
    await owner.command(waiting, "recover", generation=1)
    await owner.advance()
    assert (await owner.flow(waiting))["status"] == "running"
    await owner.command(again, "cancel")
    await owner.advance()
    assert (await owner.flow(waiting))["status"] == "failed"
    await owner.command(again, "recover", generation=1)
    await owner.command(waiting, "recover", generation=2)
    await owner.advance()
    await work(owner, again, result=1)
    assert await owner.tasks(waiting)


async def test_a_run_in_history_ends_the_wait(owner):
    """F4: a backfill of the flow that waits may come long after the run."""
    loading = await load(owner)
    await owner.advance()
    await work(owner, loading, result=7)
    await owner.pool.execute("DELETE FROM outbox")
    await owner.pool.execute(
        "CREATE TABLE day PARTITION OF flow_history FOR VALUES FROM ('2000-01-01') TO ('2100-01-01')"
    )
    await owner.pool.execute(
        "WITH moved AS (DELETE FROM flow WHERE id = $1 RETURNING *) "
        "INSERT INTO flow_history (id, root_id, finished_at, flow, nodes, past_nodes, callbacks_owed, schedule, tick) "
        "SELECT id, root_id, finished_at, to_jsonb(moved), '[]', '[]', '[]', schedule, tick FROM moved",
        loading,
    )
    waiting = await report(owner)
    await owner.advance()
    [write] = await owner.tasks(waiting)
    assert orjson.loads(write["context"])["rows"] == 7


async def test_a_flow_without_a_tick_waits_for_nothing(owner):
    """F4: the node fails and says why, instead of waiting without end."""
    flow_id = await owner.start(REPORT)
    await owner.advance()
    flow = await owner.flow(flow_id)
    assert flow["status"] == "failed"
    assert "has no tick" in flow["error"]
