"""History with the services: the gateway, the stage processor, task-sync, the check and the command
line."""

import asyncio
import json
import logging

import pytest
from click.testing import CliRunner
from tests.integration.task_sync.test_history import archives, ended_tasks, history_ids, hot_ids
from tests.support.gateways import running_gateway
from tests.support.scraping import scrape
from tests.support.services import running_service
from tests.support.waiting import wait_until

from penstock.checks.app import check
from penstock.cli.main import cli
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.local.ports import choose_port
from penstock.objects import ObjectStore
from penstock.postgres import tasks
from penstock.postgres.connection import open_pool
from penstock.postgres.types import TaskType
from penstock.settings import Platform
from penstock.task_sync import app as task_sync
from penstock.task_sync.history import History
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = (TaskType(name="t", partitions=1),)


@pytest.fixture
def settings(where):
    return TaskSyncSettings(
        **where, history_retain_days=30.0, history_every_s=0.1, metrics_port=choose_port()
    )


@pytest.fixture
def history(settings):
    return History(settings, ObjectStore(settings.objects))


def connection_settings(settings):
    return {"kafka": settings.kafka, "prefix": settings.prefix, "postgres": settings.postgres}


async def test_the_gateway_answers_reads_of_a_moved_task_as_before(pool, settings, history):
    """O6: the gateway answers reads of a moved task as before, large contexts included. It
    refuses a cancellation with the task's state, and a replay enqueues no callback."""
    async with running_gateway(**connection_settings(settings), objects=settings.objects) as gateway:
        large_context = await ObjectStore(settings.objects).check_in(Context.encode("x" * 10_000), "default")
        [failed, done] = await ended_tasks(pool, 2, state="failed", callback="dead", labels={"a": "b"})
        await pool.execute(
            "UPDATE task SET state = 'succeeded', context = NULL, context_ref = $2 WHERE id = $1",
            done,
            tasks.encode_ref(large_context.ref),
        )
        paths = [f"/tasks/{task_id}{query}" for task_id in (failed, done) for query in ("", "?context=ref")]
        before = [(await gateway.get(path)).body for path in paths]
        await history.round()
        assert await history_ids(pool) == {failed, done}
        assert [(await gateway.get(path)).body for path in paths] == before
        assert before[2]["context"] == "x" * 10_000
        assert "context_ref" not in before[2]
        assert before[3]["context_ref"]["key"] == large_context.ref.key
        refused = await gateway.post(f"/tasks/{failed}/cancel")
        assert (refused.status, refused.body["detail"]) == (
            409,
            f"task {failed} has already failed: it can no longer be cancelled",
        )
        response = await gateway.post("/tasks/cancel", {"ids": [failed, done, 10**9]})
        assert response.body == {"cancelled": [], "unchanged": [failed, done], "unknown": [10**9]}
        states = await gateway.post("/tasks/states", {"ids": [failed, done]})
        assert states.body == {"states": {"failed": 1, "succeeded": 1}, "unknown": []}
        replayed = await gateway.post("/callbacks/replay", {"ids": [f"msg_{failed}"]})
        assert (replayed.status, replayed.body["replayed"]) == (200, 0)
        assert (await gateway.get("/tasks")).body["tasks"] == []


async def test_task_sync_retires_old_tasks_while_it_releases_others(pool, settings, tmp_path):
    """O6, O2b: task-sync moves, archives and drops old tasks while it releases others. Its
    metrics count them, and the check is clean."""
    old, older = await ended_tasks(pool, 700), await ended_tasks(pool, 300, days=40)
    await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))] * 20)
    async with running_service(task_sync.create_app(settings)):
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 20 FROM task WHERE state = 'queued'"))

        async def retired():
            return await history_ids(pool) == set(old) and await pool.fetchval(
                "SELECT count(*) > 0 FROM history_part WHERE dropped_at IS NOT NULL"
            )

        await wait_until(retired)

        async def has_dropped():
            found = await scrape(settings.metrics_port)
            return found if found["penstock_history_dropped_total",] else None

        found = await wait_until(has_dropped)
        report = await check(Platform(**connection_settings(settings)))
    assert found["penstock_history_moved_total",] == 1_000
    assert found["penstock_history_archived_total",] == 300
    files = list((tmp_path / "objects" / "history").rglob("*.gz"))
    assert found["penstock_history_archived_bytes_total",] == sum(file.stat().st_size for file in files)
    assert sorted(line["id"] for part in archives(tmp_path).values() for line in part) == older
    assert report.clean
    assert report.tasks == {"queued": 20}


def _errors(caplog, event):
    """Returns the errors in the log entries of an event."""
    return " ".join(str(entry.error) for entry in caplog.records if getattr(entry, "event", None) == event)


async def test_task_sync_continues_while_archival_fails(pool, settings, tmp_path, caplog):
    """O6: with an object store that refuses writes, a day stays and task-sync logs the error
    once a round. The process continues, and tasks still move."""
    caplog.set_level(logging.WARNING, logger="penstock.task_sync")
    await ended_tasks(pool, 3, days=40)
    (tmp_path / "objects" / "history").write_text("not a folder")
    async with running_service(task_sync.create_app(settings)):
        await wait_until(
            lambda: "does not store history/day=" in _errors(caplog, "history_retirement_delayed")
        )
        late = await ended_tasks(pool, 2)
        await wait_until(lambda: hot_table_is_empty(pool))
        assert await history_ids(pool) >= set(late)
        (tmp_path / "objects" / "history").unlink()

        async def retired():
            return await history_ids(pool) == set(late)

        await wait_until(retired)


async def hot_table_is_empty(pool):
    return not await hot_ids(pool)


async def test_the_command_line_lists_and_retires_days(pool, settings, tmp_path, monkeypatch):
    """O8: the command line lists and retires days, as text and JSON; --dry-run only reports
    them."""
    monkeypatch.chdir(tmp_path)

    async def penstock(*arguments, status=0):
        options = ("--postgres", settings.postgres)
        result = await asyncio.to_thread(CliRunner().invoke, cli, ["history", *arguments, *options])
        assert result.exit_code == status, result.stderr
        return result.stdout

    assert "history is empty" in await penstock("list")
    run = ("run", "--objects", settings.objects, "--keep-days", "3", "--retain-days", "30")
    await ended_tasks(pool, 3, days=40)
    await ended_tasks(pool, 2, days=5)
    assert "5 tasks would be moved" in await penstock(*run, "--dry-run")
    assert await history_ids(pool) == set()
    report = json.loads(await penstock(*run, "--json"))
    assert (report["moved"], report["archived"], report["left"]) == (5, 3, [])
    [result] = [json.loads(line) for line in (await penstock("list", "--json")).splitlines()]
    assert (result["tasks"], result["state"], result["object"]) == (2, "open", None)
    listed = [json.loads(line) for line in (await penstock("list", "--all", "--json")).splitlines()]
    assert [(day["tasks"], day["state"]) for day in listed] == [(2, "open"), (3, "dropped")]
    assert (tmp_path / "objects" / listed[1]["object"]).stat().st_size == listed[1]["bytes"]
    assert listed[1]["object"] in await penstock("list", "--all")
    planned = await penstock("run", "--retain-days", "1", "--keep-days", "0", "--dry-run")
    assert str(listed[0]["day"]) in planned
    assert str(listed[1]["day"]) not in planned
    # The command reports a day that it cannot archive, and ends with status 1.
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "history").write_text("not a folder")
    refused = ("run", "--retain-days", "1", "--keep-days", "0", "--objects", f"file://{tmp_path}/no")
    await penstock(*refused, status=1)
    assert len(await history_ids(pool)) == 2
    async with open_pool(settings.postgres, "other") as other, other.acquire() as connection:
        await connection.execute("SELECT pg_advisory_lock(hashtextextended('penstock.history', 0))")
        await penstock(*run, status=3)
