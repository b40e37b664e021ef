"""The gate's window, delays, idleness and replicas, on the real Kafka and PostgreSQL."""

from __future__ import annotations

import logging
import os
import random
import sys
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import orjson
import pytest
from tests.running import make_topics, read_records, running_service
from tests.scraping import scrape
from tests.system import System
from tests.waiting import wait_until

from penstock import metrics
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.local.ports import choose_port
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

LONG = bool(os.environ.get("PENSTOCK_LOAD_LONG"))


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    return TaskSyncSettings(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=database,
        objects="memory:///",
        metrics_port=choose_port(),
    )


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        yield pool


@pytest.fixture
async def system(settings, pool):
    async with AsyncExitStack() as stack:
        yield System(settings.kafka, settings.prefix, settings.postgres, stack, pool)


async def submit(pool, count, **fields):
    one = Submission(type="t", context=Context.encode(None), **fields)
    return [found.id for found in await tasks.submit(pool, [one] * count)]


async def test_the_window_goes_by_what_workers_get_done(settings, pool, system, caplog):
    """S2: with nobody at work the window is its floor; workers that end some hundreds a second make it about a second of
    their work; its size, reason, lag and drain are metrics, and a change of reason is logged."""
    caplog.set_level(logging.DEBUG, logger="penstock.task_sync")
    # More than the workers' hands hold and they get done meanwhile: a window that is not full tells nothing.
    for _ in range(20):
        await submit(pool, 1_000)
    async with running_service(create_app(settings)):
        released = "penstock_released_total", "t"

        # It has no limits, and heartbeats watches its leases.
        names = {metric.name for metric in metrics.ALL if metric.labels[:1] == ("type",)} - {
            metrics.LIMIT.name,
            metrics.LEASES_LOST.name,
        }

        async def full():
            found = await scrape(settings.metrics_port)
            told = names <= {key[0] for key in found}
            return found if found.get(released) == 100 and told else None

        found = await wait_until(full)
        assert found["penstock_window_size", "floor", "t"] == settings.window_floor == 100
        assert found["penstock_window_lag", "t"] == 100
        assert await pool.fetchval("SELECT count(*) FROM task WHERE state = 'queued'") == 100
        await system.start("heartbeats", "stages")
        # 400 a second at most.
        await system.work(handler_s=0.1, pool=40, backlog=2_000)

        async def drained():
            found = await scrape(settings.metrics_port)
            size = found.get(("penstock_window_size", "drain", "t"))
            return size and abs(size - found["penstock_window_drain", "t"]) < 1 and 100 < size <= 480

        await wait_until(drained, timeout=90, what="the window is what its workers do in a second")
    assert "by its drain" in caplog.text


async def test_a_lost_notification_is_covered_by_a_sweep(settings, pool):
    """S6: what became ready or was scheduled, and a type that was registered, without a word to anybody are found by a slow
    look; and with notifications nobody waits for that."""
    slow = TaskSyncSettings(**{**vars(settings), "sweep_s": 3600.0})
    async with running_service(create_app(slow)):
        await submit(pool, 2)
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 2 FROM task WHERE state = 'queued'"))
    quick = TaskSyncSettings(**{**vars(settings), "sweep_s": 0.5})
    async with running_service(create_app(quick)):
        for state in ("ready", "scheduled"):
            await pool.execute("UPDATE task SET state = $1, due_at = now(), attempt = attempt + 1", state)
            await wait_until(lambda: pool.fetchval("SELECT count(*) = 2 FROM task WHERE state = 'queued'"))
        await pool.execute("INSERT INTO task_type (name) VALUES ('unheard')")
        await tasks.submit(pool, [Submission(type="unheard", context=Context.encode(None))])
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 3 FROM task WHERE state = 'queued'"))


async def test_delayed_tasks_are_released_when_they_are_due(settings, pool):
    """S4: tasks due at random within a while have their records within 100 ms of that at p99 (on a machine that is not
    busy with something else), and never before."""
    count, within_s = (10_000, 60.0) if LONG else (1_000, 10.0)
    chance = random.Random(4)
    # Nobody takes any of it.
    settings = TaskSyncSettings(**{**vars(settings), "window": 2 * count, "window_floor": 2 * count})
    async with running_service(create_app(settings)):
        begin = datetime.now(UTC) + timedelta(seconds=within_s / 5)
        due = sorted(begin + timedelta(seconds=chance.uniform(0, within_s)) for _ in range(count))
        for first in range(0, count, 1_000):
            some = [
                Submission(type="t", context=Context.encode(None), run_at=at)
                for at in due[first : first + 1_000]
            ]
            await tasks.submit(pool, some)
        assert datetime.now(UTC) < begin, "this machine is too slow to submit them in time"
        await wait_until(
            lambda: pool.fetchval(f"SELECT count(*) = {count} FROM task WHERE state = 'queued'"),
            every=0.5,
            timeout=within_s * 2 + 60,
        )
    due_by_id = {
        row["id"]: at
        for row, at in zip(await pool.fetch("SELECT id FROM task ORDER BY id"), due, strict=True)
    }
    records = await read_records(settings.kafka, f"{settings.prefix}ready.t")
    late_s = sorted(
        record.timestamp / 1000 - due_by_id[orjson.loads(record.value)["id"]].timestamp()
        for record in records
    )
    p50_s, p99_s = late_s[count // 2], late_s[int(count * 0.99)]
    sys.stderr.write(
        f"\n{count:,} within {within_s:g} s: late {p50_s * 1000:.0f} ms at the median, {p99_s * 1000:.0f} at p99\n"
    )
    assert len(records) == count
    # A record's timestamp has whole milliseconds.
    assert late_s[0] > -0.001
    assert p99_s < (0.1 if LONG else 1.0)


async def test_much_that_is_due_at_once_holds_up_no_other_type(settings, pool):
    """S4: 20,000 tasks due at the same moment become ready a batch at a time, and what another type submits meanwhile is
    released before all of them are."""
    await types.register(pool, types.TaskType(name="other", partitions=1))
    at = datetime.now(UTC) + timedelta(days=1)
    for _ in range(20):
        await submit(pool, 1_000, run_at=at)
    async with running_service(create_app(TaskSyncSettings(**{**vars(settings), "release_batch": 100}))):
        await pool.execute("UPDATE task SET due_at = now()")
        await pool.execute("SELECT pg_notify('penstock_due', 't')")
        await wait_until(
            lambda: pool.fetchval("SELECT count(*) > 0 FROM task WHERE state <> 'scheduled'"), every=0.001
        )
        [other] = await tasks.submit(pool, [Submission(type="other", context=Context.encode(None))])
        still = "SELECT (SELECT state FROM task WHERE id = $1) = 'queued', (SELECT count(*) FROM task WHERE state = 'scheduled')"

        async def released():
            row = await pool.fetchrow(still, other.id)
            return row if row[0] else None

        row = await wait_until(released, every=0.001)
        assert row[1] > 0, "it waited for all that was due"
