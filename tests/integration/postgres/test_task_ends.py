"""Each way of ending a task passes one trigger, and late results move what the table says."""

from __future__ import annotations

import re

import asyncpg
import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome, conclude
from penstock.core.operations import state_after_attempt
from penstock.core.task import FINAL, IN_FLIGHT, State, Transition, after, sources
from penstock.postgres import advance, tasks, types
from penstock.postgres.advance import Ending

TASK_TYPES = (types.TaskType(name="t", partitions=1), types.TaskType(name="other", partitions=1))


async def submitted(pool, state, *, attempt=0, type_name="t", tracked=False):
    """Submits a task in a state whose attempt 0 has expired; returns the fence of an attempt."""
    [found] = await tasks.submit(pool, [Submission(type=type_name, context=Context.encode(1))])
    await pool.execute(
        "UPDATE task SET state = $2, attempt = $3, tracked = $4, due_at = CASE $2 WHEN 'scheduled' THEN now() END"
        " WHERE id = $1",
        found.id,
        state,
        attempt,
        tracked,
    )
    await pool.execute(
        "INSERT INTO attempt (task_id, step, attempt, stage, outcome, finished_at)"
        " VALUES ($1, 0, 0, 'start', 'expired', now())",
        found.id,
    )
    return Fence(found.id, 0, "start", attempt)


async def report(pool, fence, outcome, *, late=False):
    """Ends an attempt; returns whether that took effect."""
    conclusion = conclude(fence, outcome, next_stage="second")
    ending = Ending(
        fence=fence, outcome=outcome, conclusion=conclusion, worker="w", context=Context.encode("out")
    )
    return (await advance.advance(pool, [ending], late=late)).applied == {fence}


async def test_the_trigger_names_all_final_states(pool):
    """The trigger finds the ends of exactly the final states of core.task."""
    text = await pool.fetchval("SELECT pg_get_functiondef('penstock.apply_ends'::regproc)")
    lists = re.findall(r"state (?:NOT )?IN \(([^)]*)\)", text)
    assert len(lists) == 3
    for listed in lists:
        assert set(re.findall(r"'(\w+)'", listed)) == FINAL


async def test_each_end_in_a_type_with_limits_makes_room(database, pool):
    """S5: task-sync is notified of each end of a tracked task, by whichever statement. It is not
    notified of other tasks, and a final task has no second end."""
    fences = [await submitted(pool, "running", attempt=1, tracked=True) for _ in range(3)]
    untracked = await submitted(pool, "running", type_name="other")
    notified = []
    connection = await asyncpg.connect(database, server_settings={"search_path": "penstock"})
    try:
        await connection.add_listener("penstock_ready", lambda *found: notified.append(found[-1]))
        await connection.execute("UPDATE task SET state = 'failed' WHERE id = $1", untracked.id)
        await connection.execute("UPDATE task SET state = 'quarantined' WHERE id = $1", fences[0].id)
        await connection.execute("UPDATE task SET state = 'succeeded' WHERE id = $1", fences[0].id)
        assert await advance.cancel(pool, [fences[1].id, fences[0].id])
        assert await report(pool, fences[2], Outcome.DONE)
        await wait_until(lambda: len(notified) >= 3, what="task-sync is notified")
        await connection.execute("NOTIFY penstock_ready, 'last'")
        await wait_until(lambda: notified[-1] == "last")
        assert notified == ["t", "t", "t", "last"]
    finally:
        await connection.close()


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.NEXT])
@pytest.mark.parametrize("state", State)
async def test_a_late_result_moves_what_the_table_says(pool, state, outcome):
    """H10: SQL accepts the late result of an expired attempt from the states of the transition
    `accepted_late`, and the result leads where it leads from `running`."""
    # The last attempt of a final task expired; an open task is in the next attempt.
    expired = await submitted(pool, state, attempt=0 if state in FINAL else 1)
    late = expired._replace(attempt=0)
    accepted = state in sources(Transition.ACCEPTED_LATE)
    assert await advance.late_attempts(pool, [late]) == ({late: 1} if accepted else {})
    assert await report(pool, late._replace(attempt=1), outcome, late=True) is accepted
    moved = Transition.SUCCEEDED if outcome is Outcome.DONE else Transition.ADVANCED
    expected = state
    if accepted:
        ended = after(after(state, Transition.ACCEPTED_LATE), moved)
        expected = state_after_attempt(ended, pausing=state is State.PAUSED)
    assert (await tasks.get(pool, late.id))["state"] == expected


@pytest.mark.parametrize("state", State)
async def test_a_result_ends_an_attempt_in_flight(pool, state):
    """W4: without an expiry, SQL accepts a result in the states of a task in flight only."""
    fence = await submitted(pool, state, attempt=1)
    assert await report(pool, fence, Outcome.DONE) is (state in IN_FLIGHT)
