"""Each end of a task of a flow writes one inbox row, by whichever code of whichever release."""

from __future__ import annotations

import asyncpg
import orjson
import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.result import Failure
from penstock.contracts.submission import Submission
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.endings import ExpiredLease
from penstock.core.retry import RetryPolicy
from penstock.postgres import advance, documents, expiry, tasks, types
from penstock.postgres.advance import Ending

TASK_TYPES = (types.TaskType(name="t", partitions=1, max_attempts=2, max_losses=2, events="all"),)

FLOW = {"id": 900, "node": "n", "generation": 2, "item": 7}


async def in_flow(pool, *, item=7, state="running", attempt=0, losses=0, failures=0):
    """Submits a task that is in a flow, and returns its fence."""
    [found] = await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))])
    await pool.execute(
        "UPDATE task SET state = $2, due_at = CASE $2 WHEN 'scheduled' THEN now() END, worker = 'w', attempt = $3, losses = $4, failures = $5, flow_id = 900,"
        " flow_root_id = 777, flow_priority = 0, flow_node = 'n', flow_generation = 2, flow_item = $6 WHERE id = $1",
        found.id,
        state,
        attempt,
        losses,
        failures,
        item,
    )
    return Fence(found.id, 0, "start", attempt)


async def inbox(pool):
    """The rows of the inbox, which are deleted."""
    rows = await pool.fetch("DELETE FROM flow_inbox RETURNING *")
    return [
        (row["shard"], row["root_id"], row["flow_id"], row["kind"], row["node"], row["generation"], row["item"],
         row["state"], row["task_id"])
        for row in sorted(rows, key=lambda row: row["id"])
    ]  # fmt: skip


def ends(*pairs):
    """The expected rows: item, state and task."""
    return [(777 % 64, 777, 900, "task", "n", 2, item, state, task_id) for item, state, task_id in pairs]


async def report(pool, fence, outcome, *, late=False, **options):
    """Ends an attempt as the stage processor does; returns the events."""
    ending = Ending(
        fence=fence,
        outcome=outcome,
        conclusion=conclude(fence, outcome, **options),
        worker="w",
        context=Context.encode("out") if outcome is Outcome.DONE else None,
        error=Failure(kind="E", message="m") if outcome in (Outcome.FAIL, Outcome.RETRY) else None,
    )
    found = await advance.advance(pool, [ending], late=late)
    assert found.applied == {fence}
    return [orjson.loads(event) for event in found.outbox.events]


async def expire(pool, fence):
    """Ends an attempt as the heartbeat processor does."""
    lease = ExpiredLease(AttemptId(fence.id, fence.step, fence.attempt), "w", "silent")
    found = await expiry.expire(pool, [lease], chance=lambda: 0.0, source="urn:test")
    assert len(found.ended) == 1


async def test_each_final_state_is_noted_once(pool):
    """F1: success, failure, quarantine, cancellation and the loss of the last attempt write one row
    each; attempts that are followed by another write none. Events of the task name its flow."""
    fence = await in_flow(pool)
    [event] = await report(pool, fence, Outcome.NEXT, next_stage="second")
    assert (event["event"], event["task"]["flow"]) == ("task.advanced", FLOW)
    assert await inbox(pool) == []
    await pool.execute("UPDATE task SET state = 'running'")
    [event] = await report(pool, Fence(fence.id, 1, "second", 0), Outcome.DONE)
    assert (event["event"], event["task"]["flow"]) == ("task.succeeded", FLOW)
    assert await inbox(pool) == ends((7, "succeeded", fence.id))
    assert documents.detail(await tasks.get(pool, fence.id))["flow"] == FLOW

    policy = RetryPolicy(1.0, 2.0, 10.0, 0.0, max_attempts=2)
    fence = await in_flow(pool, item=None)
    [event] = await report(pool, fence, Outcome.FAIL, policy=policy)
    assert (event["event"], event["task"]["flow"]) == (
        "task.retried",
        {k: v for k, v in FLOW.items() if k != "item"},
    )
    assert await inbox(pool) == []
    await pool.execute("UPDATE task SET state = 'running' WHERE id = $1", fence.id)
    await report(pool, fence._replace(attempt=1), Outcome.FAIL, permanent=True)
    assert await inbox(pool) == ends((None, "failed", fence.id))

    out_of_attempts = await in_flow(pool, item=1, attempt=1, failures=1)
    await expire(pool, out_of_attempts)
    quarantined = await in_flow(pool, item=2, attempt=1, losses=1)
    await expire(pool, quarantined)
    first_loss = await in_flow(pool, item=3)
    await expire(pool, first_loss)
    assert await inbox(pool) == ends((1, "failed", out_of_attempts.id), (2, "quarantined", quarantined.id))

    # Every state can be cancelled, and cancelling twice is no second end.
    states = ("scheduled", "ready", "queued", "running", "paused")
    fences = [await in_flow(pool, item=10 + n, state=state) for n, state in enumerate(states)]
    plain = await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))])
    ids = [fence.id for fence in fences] + [one.id for one in plain]
    for expected in (len(ids), 0):
        cancelled, outbox = await advance.cancel(pool, ids)
        assert len(cancelled) == len(outbox.events) == expected
    assert await inbox(pool) == ends(*((10 + n, "cancelled", fence.id) for n, fence in enumerate(fences)))


async def test_a_late_result_is_no_second_end(pool):
    """H10, F1: a late result after the end changes the task of a flow, and writes no second row."""
    fence = await in_flow(pool, attempt=1, failures=1)
    await expire(pool, fence)
    assert await inbox(pool) == ends((7, "failed", fence.id))
    [(found, now_at)] = (await advance.late_attempts(pool, [fence])).items()
    assert found == fence
    [event] = await report(pool, fence._replace(attempt=now_at), Outcome.DONE, late=True)
    assert event["event"] == "task.succeeded"
    assert (await tasks.get(pool, fence.id))["state"] == "succeeded"
    assert await inbox(pool) == []


async def test_an_older_service_ends_tasks_of_flows(database, pool):
    """O6, F1: the statement of any release writes the row, with the rights that its role had before
    there were flows; the owner of the shard is notified once a statement."""
    fences = [await in_flow(pool, item=n) for n in range(3)]
    notified = []
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    role = f"old_{fences[0].id}"
    try:
        await connection.add_listener("penstock_flows", lambda *found: notified.append(found[-1]))
        await connection.execute(
            f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA penstock TO {role};"
            f"GRANT SELECT, UPDATE ON task TO {role}; GRANT INSERT ON backlog_change TO {role}; SET ROLE {role}"
        )
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("INSERT INTO flow_inbox (root_id, flow_id, kind) VALUES (1, 1, 'began')")
        for state in ("queued", "succeeded", "succeeded"):
            await connection.execute(
                "UPDATE task SET state = $1, updated_at = now() WHERE flow_id = 900", state
            )
        await connection.execute("RESET ROLE")
        await wait_until(lambda: notified, what="the owner of the shard is notified")
        assert notified == [str(777 % 64)]
    finally:
        await connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")
        await connection.close()
    assert await inbox(pool) == ends(*((n, "succeeded", fence.id) for n, fence in enumerate(fences)))
