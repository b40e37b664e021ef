"""`penstock check` sees leases: by the heartbeats on Kafka, and without reading all tasks."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from tests.integration.checks.test_checks import (
    LONG_AGO,
    check_one,
    full_name,
    group_member,
    read_all,
    result,
    task,
)
from tests.support.services import write
from tests.support.waiting import wait_until

from penstock.checks import app, in_transit, rows
from penstock.checks.app import Rule, check
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.core.attempt import AttemptId
from penstock.kafka.topology.topics import service_group
from penstock.postgres import checks, tasks
from penstock.postgres.queries import query


@pytest.fixture
async def heartbeats(settings):
    """A member of the group of heartbeat processors, which reads all partitions and watches
    nothing."""
    async with group_member(settings, service_group(settings.prefix, "heartbeats"), "heartbeats"):
        yield


async def silent_task(pool):
    """A running attempt of the worker `w` with a lease of a second; its row is two minutes old."""
    return await task(
        pool,
        state="'running'",
        worker="'w'",
        lease_partition="0",
        lease_ms="1000",
        updated_at=LONG_AGO,
    )


@pytest.mark.usefixtures("heartbeats")
async def test_a_running_attempt_whose_worker_is_silent_is_found_and_ended(settings, pool):
    """O2b, H10: no processor watches the attempt, although one reads its partition. The check finds
    it by the heartbeats that are missing, and the repair ends it as an expired lease does."""
    lost = await silent_task(pool)
    found = await check_one(settings)
    assert (found.rule, found.id) == (Rule.UNWATCHED, lost)
    assert "is running on w, which has sent no heartbeat" in found.lacks
    report = await check(settings, repair=True)
    assert report.repaired == {Rule.UNWATCHED: 1}
    assert report.well
    row = await tasks.get(pool, lost)
    assert (row["state"], row["attempt"], row["losses"]) == ("scheduled", 1, 1)
    assert [(each["outcome"], each["worker"]) for each in row["attempts"]] == [("expired", "w")]


@pytest.mark.usefixtures("heartbeats")
async def test_a_heartbeat_during_the_repair_keeps_its_attempt(settings, pool, caplog):
    """H10: by a wrong clock every heartbeat is old. The repair waits for the next one, and ends
    nothing that is alive."""
    running = await silent_task(pool)
    repair = asyncio.create_task(check(settings, repair=True))
    await wait_until(
        lambda: "silent_watched" in [getattr(record, "event", "") for record in caplog.records],
        what="the repair watches the attempt",
    )
    beat = Heartbeat(Kind.BEAT, "w", 1_000, [AttemptId(running, 0, 0)]).encode()
    await write(settings.kafka, full_name(settings, "heartbeats"), beat)
    await repair
    assert (await tasks.get(pool, running))["state"] == "running"


@pytest.mark.usefixtures("heartbeats")
@pytest.mark.parametrize(
    ("kind", "worker", "watched"),
    [
        (Kind.BEAT, "w", True),
        (Kind.CLAIM, "w", True),
        (Kind.RELEASE, "w", False),
        (Kind.BEAT, "another", False),
    ],
)
async def test_only_a_heartbeat_of_the_holder_keeps_an_attempt(settings, pool, kind, worker, watched):
    """O2b: an attempt that its worker keeps alive is no offender, however old its row is. The end
    of a lease and the heartbeats of another worker keep none."""
    running = await silent_task(pool)
    beat = Heartbeat(kind, worker, 1_000, [AttemptId(running, 0, 0)]).encode()
    await write(settings.kafka, full_name(settings, "heartbeats"), beat)
    await read_all(settings, service_group(settings.prefix, "heartbeats"), "heartbeats")
    assert (await check(settings)).counts[Rule.UNWATCHED] == (0 if watched else 1)


@pytest.mark.usefixtures("heartbeats")
async def test_a_fresh_attempt_has_a_lease(settings, pool):
    """O2b: a row that was just written as running may have a claim that is still unread."""
    await task(pool, state="'running'", worker="'w'", lease_partition="0", lease_ms="1000")
    assert (await check(settings)).clean


@pytest.mark.usefixtures("heartbeats")
async def test_a_silent_attempt_with_an_unread_result_stays(settings, pool, monkeypatch):
    """H10: the result on Kafka may be its own, so that the check neither reports nor ends it."""
    monkeypatch.setattr(in_transit, "SETTLE_S", 0.3)
    finished = await silent_task(pool)
    await write(settings.kafka, full_name(settings, "stage-results"), result(finished))
    report = await check(settings, repair=True)
    assert report.counts[Rule.UNWATCHED] == 0
    assert (await tasks.get(pool, finished))["state"] == "running"
    await read_all(settings, service_group(settings.prefix, "stages"), "stage-results")
    assert (await check(settings)).counts[Rule.UNWATCHED] == 1


MOST = 50
ROWS = 4_000
STATES = ("scheduled", "ready", "queued", "running", "waiting", "paused", "succeeded")


def examined(plan):
    """The most rows that a scan of a plan read in one of its loops, with what it read."""
    if plan["Node Type"].endswith("Scan") and plan.get("Relation Name") in ("task", "callback"):
        removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        yield plan["Actual Rows"] + removed, plan["Relation Name"]
    for child in plan.get("Plans", ()):
        yield from examined(child)


@pytest.mark.usefixtures("heartbeats")
async def test_no_number_reads_all_rows_of_a_large_table(settings, pool, monkeypatch):
    """O2b: the check counts up to a bound, and examines all tasks in ranges. No statement of it
    reads more rows of a table than that, whichever state they have."""
    for module in (app, in_transit):
        monkeypatch.setattr(module, "MOST_COUNTED", MOST)
    for check_type in (rows.Overdue, rows.Undelivered):
        monkeypatch.setattr(check_type, "arguments", (60.0, MOST))
    monkeypatch.setattr(checks, "RANGE", MOST)
    for state in STATES:
        await pool.execute(
            """
            INSERT INTO task (type, stage, content_type, context, state, worker, lease_partition, lease_ms, due_at, finished_at, updated_at)
            SELECT 't', 'start', 'json', 'x'::bytea, $1::text, CASE $1 WHEN 'running' THEN 'w' END, CASE $1 WHEN 'running' THEN 0 END, 3600000,
                   CASE $1 WHEN 'scheduled' THEN now() - interval '2 minutes' END,
                   CASE $1 WHEN 'succeeded' THEN now() END, now() - interval '2 minutes'
            FROM generate_series(1, $2)
            """,
            state,
            ROWS,
        )
    await pool.execute("ANALYZE task")
    bounded = {
        "states": (MOST,),
        "ready": (60.0, MOST),
        "running": (2, MOST),
        "overdue": (20, 60.0, MOST),
        "task_range": (0, MOST),
        "waiting": (0, MOST),
        "tasks_ahead": (0, MOST, 60.0),
        "callback_states": (MOST,),
        "undelivered": (20, 60.0, MOST),
    }
    for name, arguments in bounded.items():
        async with pool.acquire() as connection, connection.transaction():
            explained = await connection.fetchval(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {query(f'checks.{name}')}", *arguments
            )
        [plan] = orjson.loads(explained)
        assert max(examined(plan["Plan"]), default=(0, ""))[0] <= MOST, (name, plan)
    report = await check(settings)
    assert report.tasks == dict.fromkeys(STATES, MOST)
    assert report.counts[Rule.OVERDUE] == MOST
    assert report.counts[Rule.WAITING] == ROWS
