"""Backlog counters equal the number of tasks after every operation. The check finds and repairs
wrong counters."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import aiohttp
import asyncpg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.cli.test_cli import penstock, set_state
from tests.support.invoking import documents
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock.checks.app import Rule, check
from penstock.client import Client
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.completion import Conclusion, FailureCounts, Fence, Outcome
from penstock.core.task import Priority, State
from penstock.errors import LockConflict, NotFound
from penstock.local.ports import choose_port
from penstock.postgres import advance, backlog, tasks, types
from penstock.postgres.connection import open_pool
from penstock.postgres.ending import Ending
from penstock.postgres.queries import bound, query, statement
from penstock.settings import Platform
from penstock.task_sync import backlog_counters
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

__all__ = ["penstock"]  # fixture

TYPES = ("t", "u")
TASK_TYPES = tuple(types.TaskType(name=name, partitions=1) for name in TYPES)
OPEN = {
    "scheduled": "scheduled",
    "ready": "ready",
    "queued": "in_flight",
    "running": "in_flight",
    "waiting": "waiting",
    "paused": "paused",
}


async def counters(pool):
    """Returns the counters by type, priority, stage and state."""
    return Counter(
        {
            (line.type, line.priority, line.stage, state): getattr(line, state)
            for line in await backlog.entries(pool)
            for state in backlog.STATES
            if getattr(line, state)
        }
    )


async def counted_tasks(pool):
    """Counts the tasks by type, priority, stage and state."""
    rows = await pool.fetch("SELECT type, priority, stage, state FROM task")
    return Counter(
        (row["type"], row["priority"], row["stage"], OPEN[row["state"]])
        for row in rows
        if row["state"] in OPEN
    )


async def miscounted(pool):
    """Returns the wrong counters that the check finds in one snapshot."""
    return await backlog.miscounted(pool)


class RandomOperations:
    """Applies random operations of the platform to tasks."""

    def __init__(self, pool, seed):
        self.pool = pool
        self.random = random.Random(seed)

    async def sample(self, *states):
        rows = await self.pool.fetch(
            "SELECT id, step, stage, attempt, state FROM task WHERE state = ANY ($1) ORDER BY id",
            list(states),
        )
        return [row for row in rows if self.random.random() < 0.4]

    async def ids(self, *states):
        return [row["id"] for row in await self.sample(*states)]

    async def submit(self):
        now = datetime.now(UTC)
        submissions = [
            Submission(
                type=self.random.choice(TYPES),
                context=Context.encode(None),
                stage=self.random.choice((None, "second")),
                priority=self.random.choice(list(Priority)),
                idempotency_key=self.random.choice((None, "one", "two")),
                run_at=self.random.choice((None, now + timedelta(hours=1))),
            )
            for _ in range(self.random.randint(1, 9))
        ]
        await tasks.submit(self.pool, submissions)

    async def release(self):
        chosen = {"type": self.random.choice(TYPES), "limit": 5, "excluded": [], "version": None}
        await self.pool.fetch(*bound("release.release", **chosen, confirmed=[], tracked=False))

    async def promote(self):
        await self.pool.execute("UPDATE task SET due_at = now() WHERE state = 'scheduled' AND id % 2 = 0")
        await self.pool.fetch(query("release.promote"), 3)

    async def claim(self):
        rows = await self.sample("queued", "running")
        count = len(rows)
        await self.pool.fetch(
            *bound(
                "leases.claimed",
                **{name: [row[name] for row in rows] for name in ("id", "step", "attempt")},
                worker=["w"] * count,
                partition=[0] * count,
                lease_ms=[1000] * count,
                max_attempts=[None] * count,
                by_heartbeat=[False] * count,
            )
        )

    async def end(self):
        endings = []
        for row in await self.sample("queued", "running"):
            outcome, state, stage, step, attempt, delay_s = self.random.choice(
                (
                    (Outcome.DONE, State.SUCCEEDED, row["stage"], row["step"], row["attempt"], 0.0),
                    (Outcome.NEXT, State.READY, "next", row["step"] + 1, 0, 0.0),
                    (Outcome.NEXT, State.SCHEDULED, "next", row["step"] + 1, 0, 60.0),
                    (Outcome.FAIL, State.FAILED, row["stage"], row["step"], row["attempt"], 0.0),
                    (Outcome.FAIL, State.SCHEDULED, row["stage"], row["step"], row["attempt"] + 1, 60.0),
                )
            )
            fence = Fence(row["id"], row["step"], row["stage"], row["attempt"])
            conclusion = Conclusion(state, stage, step, attempt, delay_s, FailureCounts())
            endings.append(Ending(fence=fence, outcome=outcome, conclusion=conclusion, worker="w"))
        if endings:
            await advance.advance(self.pool, endings)

    async def cancel(self):
        await advance.cancel(self.pool, (await self.ids(*OPEN))[:3])

    async def pause(self):
        await self.pool.fetch(query("operations.pause"), await self.ids(*OPEN))

    async def resume(self):
        await self.pool.fetch(query("operations.resume"), await self.ids(*OPEN))

    async def reprioritise(self):
        await self.pool.fetch(
            query("operations.reprioritise"), (await self.ids(*OPEN))[:4], self.random.randrange(5)
        )

    async def recover(self):
        await self.pool.fetch(query("operations.recover"), await self.ids("failed"))

    async def manual_change(self):
        """Changes a row as an operator might."""
        [row] = (await self.sample(*OPEN))[:1] or [None]
        if row is not None:
            statement = self.random.choice(
                (
                    "UPDATE task SET state = 'waiting' WHERE id = $1",
                    "UPDATE task SET stage = 'third' WHERE id = $1",
                    # A concurrent submission with the same idempotency key needs its first task.
                    "DELETE FROM task WHERE id = $1 AND idempotency_key IS NULL",
                )
            )
            await self.pool.execute(statement, row["id"])

    async def rollback(self):
        """Changes tasks in a transaction that is rolled back."""
        async with self.pool.acquire() as connection:
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute("UPDATE task SET priority = 4 - priority, stage = 'undone'")
            await transaction.rollback()

    async def fold(self):
        await backlog.fold(self.pool, self.random.choice((TYPES, TYPES[:1])))

    async def sweep(self):
        await backlog.delete_empty(self.pool, TYPES)

    async def step(self):
        steps = (
            *(self.submit, self.release, self.end) * 3,
            *(
                self.promote,
                self.claim,
                self.cancel,
                self.pause,
                self.resume,
                self.reprioritise,
                self.recover,
            ),
            *(self.manual_change, self.rollback, self.fold, self.sweep),
        )
        await self.random.choice(steps)()


@pytest.mark.parametrize("seed", range(2))
async def test_counters_equal_the_tasks_after_every_operation(pool, seed):
    """S8: the counters equal a count of all tasks after each of many random operations: submission,
    release, claim, end, retry, cancellation, pause, re-prioritisation, recovery, deletion, rollback
    and fold."""
    operations = RandomOperations(pool, seed)
    largest = 0
    for _ in range(150):
        await operations.step()
        found = await counters(pool)
        assert found == await counted_tasks(pool)
        assert not await miscounted(pool)
        largest = max(largest, len(found))
    # Times and locks vary between runs, and with them the tasks that an operation finds.
    assert largest > 5
    await pool.execute("DELETE FROM task")
    await backlog.fold(pool, TYPES)
    assert not await counters(pool)
    await backlog.delete_empty(pool, TYPES)
    assert await pool.fetchval("SELECT count(*) FROM backlog") == 0
    assert await pool.fetchval("SELECT count(*) FROM backlog_change") == 0


async def test_counters_are_exact_in_every_snapshot(pool):
    """S8: every snapshot counts each task exactly once, even during folds. Writers never wait for a
    counter, so that counters cause no deadlock."""
    async with asyncio.TaskGroup() as group:

        async def run(seed):
            operations = RandomOperations(pool, seed)
            for _ in range(60):
                # Operations that lock tasks in another order may deadlock: see `operations.lock`. A
                # submission waits half a second for a key that another transaction has, and its
                # sender repeats it; here the next step does.
                try:
                    await operations.step()
                except (asyncpg.DeadlockDetectedError, LockConflict) as error:
                    met = error.__cause__ or error
                    assert "backlog" not in str(met.detail) + str(met.context)

        runs = [group.create_task(run(seed)) for seed in range(10, 14)]

        async def check_snapshots():
            while not all(task.done() for task in runs):
                assert not await miscounted(pool)

        group.create_task(check_snapshots())
    assert await counters(pool) == await counted_tasks(pool)


async def test_the_oldest_age_counts_from_becoming_ready(pool):
    """S8: the oldest age of a line is the time since its oldest task became ready. One index probe
    finds it."""
    for stage, priority, age_s in (("a", 0, 50), ("a", 0, 200), ("a", 1, 70), ("b", 0, 300)):
        [one] = await tasks.submit(
            pool,
            [Submission(type="t", context=Context.encode(None), stage=stage, priority=Priority(priority))],
        )
        await pool.execute(
            "UPDATE task SET updated_at = now() - make_interval(secs => $2) WHERE id = $1", one.id, age_s
        )
    await pool.execute("UPDATE task SET state = 'queued' WHERE stage = 'b'")
    found = {(line.stage, int(line.priority)): line.oldest_s for line in await backlog.entries(pool)}
    assert found.pop(("b", 0)) is None
    assert {place: round(age_s, -1) for place, age_s in found.items()} == {("a", 0): 200, ("a", 1): 70}
    text, parameters = statement("backlog.entries")
    rows = await pool.fetch(f"EXPLAIN {text}", *(10 if name == "limit" else None for name in parameters))
    plan = "\n".join(row[0] for row in rows)
    assert "using task_ready_oldest on task" in plan
    assert plan.count(" on task") == 1


async def test_wrong_counters_are_found_and_repaired(where, pool):
    """S8, O2b: `penstock check` names each wrong counter, and `--repair` corrects it while tasks
    change."""
    settings = Platform(**where)
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(n)) for n in range(5)])
    assert (await check(settings)).clean
    await backlog.fold(pool, TYPES)
    await pool.execute("UPDATE backlog SET tasks = tasks + 3")
    await pool.execute("INSERT INTO backlog VALUES ('t', 'gone', 2, 'paused', 1)")
    report = await check(settings)
    assert report.counts == {Rule.MISCOUNTED: 2}
    assert {(offender.what, offender.id, offender.lacks) for offender in report.offenders} == {
        ("counter", "t/gone", "at MEDIUM, paused: the counter says 1, and there are 0 tasks"),
        ("counter", "t/start", "at MEDIUM, ready: the counter says 8, and there are 5 tasks"),
    }
    async with asyncio.TaskGroup() as group:
        operations = RandomOperations(pool, 3)

        async def run():
            for _ in range(20):
                await operations.submit()
                await operations.fold()

        group.create_task(run())
        # Three concurrent repairs: only one corrects the counters.
        repaired = [group.create_task(backlog.recount(pool)) for _ in range(3)]
    assert sorted(task.result() for task in repaired) == [0, 0, 2]
    assert await counters(pool) == await counted_tasks(pool)
    await pool.execute("UPDATE backlog SET tasks = 0")
    repaired = await check(settings, repair=True)
    assert (repaired.well, repaired.repaired.keys()) == (True, {Rule.MISCOUNTED})
    assert not await miscounted(pool)


async def test_no_statement_of_a_recount_reads_all_tasks(database, pool):
    """S8, O2b: a recount reads some tasks at a time. It corrects the counters while tasks change,
    although one statement over all tasks would exceed the time limit of statements."""
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(n)) for n in range(3_000)])
    await pool.execute("UPDATE task SET state = 'succeeded' WHERE id % 3 = 0")
    await pool.execute("INSERT INTO backlog VALUES ('t', 'gone', 2, 'paused', 1)")
    # From now on the state of each task takes a millisecond.
    await pool.execute(
        "CREATE OR REPLACE FUNCTION penstock.backlog_state(state text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN "
        "PERFORM pg_sleep(0.001); RETURN CASE WHEN state IN ('queued', 'running') THEN 'in_flight' "
        "WHEN state IN ('succeeded', 'failed', 'cancelled', 'quarantined') THEN NULL ELSE state END; END $$"
    )
    await pool.execute(
        f"ALTER DATABASE {await pool.fetchval('SELECT current_database()')} SET statement_timeout = '1s'"
    )
    async with open_pool(database, "limited") as limited, asyncio.TaskGroup() as group:
        recount = group.create_task(backlog.recount(limited, rows_per_statement=50))
        operations = RandomOperations(pool, 5)
        while not recount.done():
            await operations.submit()
            await pool.execute("UPDATE task SET state = 'paused' WHERE id = (SELECT max(id) FROM task)")
            await operations.fold()
    assert recount.result() == 1
    assert await counters(pool) == await counted_tasks(pool)


async def scraped(port):
    url = f"http://127.0.0.1:{port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
    return {
        tuple(
            sample.labels[name] for name in ("type", "stage", "priority", "state") if name in sample.labels
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("penstock_backlog")
    }


async def test_task_sync_folds_changes_and_exports_metrics(where, pool, monkeypatch):
    """S8: the owner folds changes, and its metrics show depth and oldest age by type, stage and
    priority. Tasks that end without a notification count, too."""
    monkeypatch.setattr(backlog_counters, "FOLD_S", 0.1)
    folded_changes = []

    async def fold(*arguments, really=backlog.fold):
        found = await really(*arguments)
        folded_changes.append(found[0])
        return found

    monkeypatch.setattr(backlog, "fold", fold)
    port = choose_port()
    settings = TaskSyncSettings(**where, metrics_port=port, window=10, window_floor=10, release_batch=10)
    submissions = [
        Submission(type="t", context=Context.encode(None), priority=Priority.LOW) for _ in range(30)
    ]
    await tasks.submit(pool, submissions)
    async with running_service(create_app(settings)):
        line = ("t", "start", "LOW")

        async def has_metrics(**states):
            found = await scraped(port)
            return all(found.get((*line, state)) == tasks for state, tasks in states.items()) and found

        found = await wait_until(
            lambda: has_metrics(ready=20, in_flight=10, paused=0, scheduled=0, waiting=0)
        )
        assert found[line] > 0
        await wait_until(lambda: folded_changes[-3:] == [0, 0, 0])
        await pool.execute(
            "UPDATE task SET updated_at = now() - interval '1 h' WHERE id = (SELECT max(id) FROM task)"
        )
        # These tasks end without a notification.
        await pool.execute("UPDATE task SET state = 'succeeded' WHERE state = 'queued'")
        found = await wait_until(lambda: has_metrics(ready=20, in_flight=0))
        assert found[line] > 3_500
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 0 FROM backlog_change"))
    assert not await miscounted(pool)


async def test_counters_survive_a_killed_owner(kafka_servers, prefix, database, pool, tmp_path):
    """S8, S7: the counters stay correct while task-sync is killed (-9) repeatedly, and the next
    owner folds the remaining changes."""
    await make_topics(kafka_servers, prefix)
    environment = {
        **os.environ,
        "PENSTOCK_KAFKA": kafka_servers,
        "PENSTOCK_PREFIX": prefix,
        "PENSTOCK_POSTGRES": database,
        "PENSTOCK_OBJECTS": f"file://{tmp_path}",
        "PENSTOCK_OWN_RETRY_S": "0.2",
    }
    operations = RandomOperations(pool, 7)

    async def folded_counters():
        return await pool.fetch("SELECT * FROM backlog ORDER BY type, stage, priority, state")

    async def folded(before):
        await operations.submit()
        await operations.end()
        assert not await miscounted(pool)
        return await folded_counters() != before

    async def no_owner_works():
        # The server ends the statement of a killed client, and commits it.
        return not await pool.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name LIKE 'penstock task-sync%'"
        )

    async with AsyncExitStack() as stack:
        for _ in range(3):
            before = await folded_counters()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", "run", "task-sync"),
                env=environment,
                stdout=asyncio.subprocess.DEVNULL,
            )

            async def end(process=process):
                if process.returncode is None:
                    process.kill()
                await process.wait()

            stack.push_async_callback(end)
            await wait_until(lambda before=before: folded(before))
            process.kill()
            await process.wait()
            await wait_until(no_owner_works)
    assert await counters(pool) == await counted_tasks(pool)


async def test_the_backlog_is_shown_over_http_and_by_command(penstock, database):
    """S8, O8: `GET /backlog` returns pages of all types or one, and `penstock types backlog` prints
    them. Both include changes that are not yet folded."""
    assert (await penstock("types", "add", "report")).exit_code == 0
    for _ in range(3):
        await penstock("submit", "media", "--priority", "LOW")
    await penstock("submit", "media", "--stage", "a/b ü")
    [report] = documents(await penstock("submit", "report", "--json"))
    await set_state(database, "running", report["id"])
    async with Client(os.environ["PENSTOCK_GATEWAY"]) as client:
        lines = [line async for line in client.backlog()]
        assert [line["type"] for line in lines] == ["media", "media", "report"]
        places = {(line["stage"], line["priority"]) for line in lines}
        assert places == {("probe", "LOW"), ("a/b ü", "MEDIUM"), ("start", "MEDIUM")}
        by_place = {line["stage"]: line for line in lines}
        assert (by_place["probe"]["ready"], by_place["probe"]["oldest_s"] > 0) == (3, True)
        assert (by_place["start"]["in_flight"], by_place["start"]["oldest_s"]) == (1, None)
        assert [line["stage"] async for line in client.backlog("report")] == ["start"]
        assert [line["stage"] async for line in client.backlog("media", limit=1)] == ["a/b ü"]
        with pytest.raises(NotFound, match="there is no task type 'nothing'"):
            [line async for line in client.backlog("nothing")]
        paged, cursor = [], {}
        while cursor is not None:
            page = await client._request("GET", "/backlog", query=[("limit", "1"), *cursor.items()])
            paged += page["backlog"]
            cursor = {"cursor": page["next"]} if page["next"] else None
        assert [line | {"oldest_s": 0} for line in paged] == [line | {"oldest_s": 0} for line in lines]
        async with client._session.get(f"{client.url}/backlog?cursor=media/LOUD/x") as answer:
            assert answer.status == 422
    result = await penstock("types", "backlog")
    assert result.stdout.splitlines()[0].split()[:4] == ["type", "priority", "stage", "ready"]
    assert any(line.split()[:4] == ["media", "LOW", "probe", "3"] for line in result.stdout.splitlines())
    [one] = documents(await penstock("types", "backlog", "report", "--json"))
    assert one["in_flight"] == 1
    assert (await penstock("types", "add", "idle")).exit_code == 0
    assert "no task is waiting" in (await penstock("types", "backlog", "idle")).stdout
    unknown = await penstock("types", "backlog", "nothing")
    assert (unknown.exit_code, "there is no task type 'nothing'" in unknown.stderr) == (4, True)
