"""The timeline of a task, and reruns from its stages, with all services and real servers."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest
from tests.support.services import running_service
from tests.support.waiting import wait_until

from penstock.checks.app import check
from penstock.client import Client
from penstock.core.history import day_of
from penstock.errors import IdempotencyConflict, NotFound, RerunRefused
from penstock.postgres import documents, history, types
from penstock.postgres.session import open_session
from penstock.postgres.timeline import KEPT_INPUTS
from penstock.task_sync.settings import TaskSyncSettings
from penstock.worker import Done, Next, Worker, WorkerSettings

DISTANT = datetime(2090, 1, 1, tzinfo=UTC)
STAGES = ("first", "second", "third")
TASK_TYPES = (
    types.TaskType(name="order", partitions=2, first_stage="first", retry_base_ms=10, retry_jitter=0),
)


class Pipeline:
    """A deployment whose tasks of the type `order` have three stages.

    Each stage adds its name to the text of the context. The second one fails once for each task.
    """

    def __init__(self, client, where):
        self.client = client
        self.where = where
        self.runs = Counter()
        self.held = asyncio.Event()
        self.held.set()

    def worker(self):
        worker = Worker(WorkerSettings(**{name: self.where[name] for name in ("kafka", "prefix", "objects")}))

        @worker.stage("order.first")
        async def first(task):
            return Next("second", [*task.context, "first"])

        @worker.stage("order.second")
        async def second(task):
            await self.held.wait()
            self.runs[task.id] += 1
            if self.runs[task.id] == 1:
                raise ValueError("once")
            return Next("third", [*task.context, "second"])

        @worker.stage("order.third")
        async def third(task):
            return Done([*task.context, "third"])

        return worker

    async def submit(self, context, **fields):
        submitted = await self.client.submit("order", context, **fields)
        [task] = await self.client.results([submitted.id])
        return task

    async def rerun(self, task, stage, **fields):
        submitted = await self.client.rerun(task.id, from_stage=stage, **fields)
        [again] = await self.client.results([submitted.id])
        return again


@pytest.fixture
async def pipeline(system, gateway, where):
    await system.start("task-sync", "heartbeats", "stages")
    async with Client(gateway.url) as client:
        made = Pipeline(client, where)
        async with running_service(made.worker().serve):
            yield made


async def test_only_the_first_stages_keep_their_inputs(pipeline, where):
    """F3: a task that loops has a bounded timeline; a later stage is refused with the reason."""
    worker = Worker(WorkerSettings(**{name: where[name] for name in ("kafka", "prefix", "objects")}))
    await pipeline.client.register_type("loop", first_stage="s0")

    def stage(number):
        async def handler(task):
            return Next(f"s{number + 1}", number) if number <= KEPT_INPUTS else Done(number)

        worker.stage(f"loop.s{number}")(handler)

    for number in range(KEPT_INPUTS + 2):
        stage(number)
    async with running_service(worker.serve):
        submitted = await pipeline.client.submit("loop", None)
        [task] = await pipeline.client.results([submitted.id])
    kept = [step["step"] for step in task.raw["timeline"] if "input_size" in step]
    assert kept == [*range(KEPT_INPUTS), KEPT_INPUTS + 1]
    with pytest.raises(RerunRefused, match="was not kept"):
        await pipeline.client.rerun(task.id, from_stage=f"s{KEPT_INPUTS}")


def settings_of(where):
    return TaskSyncSettings(**where)


async def require_clean(where):
    async def is_clean():
        return (await check(settings_of(where), show=3)).clean

    await wait_until(is_clean, what="the check is clean")


@pytest.mark.parametrize("size", [10, 50_000], ids=["inline", "object"])
async def test_a_rerun_from_each_stage_gives_the_result_of_a_fresh_task(pipeline, where, size):
    """F3: a rerun begins in its stage, with the input that the stage got, and ends as a fresh task
    does. The rerun is a new task with the settings of the first one, which stays as it is."""
    text = "x" * size
    fresh = await pipeline.submit([text], labels={"a": "b"}, priority="HIGH", key="k", events="all")
    assert fresh.result == [text, *STAGES]
    before = (await pipeline.client.get(fresh.id)).raw
    for number, stage in enumerate(STAGES):
        again = await pipeline.rerun(fresh, stage)
        assert again.id != fresh.id
        assert again.result == fresh.result
        assert [step["stage"] for step in again.raw["timeline"]] == [*STAGES[number:]]
        assert again.raw["rerun_of"] == fresh.id
        for name in ("type", "labels", "priority", "key", "events", "callbacks"):
            assert again.raw[name] == fresh.raw[name]
    # Without a stage it begins in the first one; a rerun can be rerun.
    whole = await pipeline.rerun(again, None)
    assert [step["stage"] for step in whole.raw["timeline"]] == ["third"]
    assert whole.result == fresh.result
    assert (await pipeline.client.get(fresh.id)).raw == before
    await require_clean(where)


async def test_the_timeline_has_inputs_and_attempts(pipeline):
    """F3: a task shows each stage that it has entered with its input, and each attempt with its
    worker and when it was queued, began and ended; also the one that runs."""
    pipeline.held.clear()
    submitted = await pipeline.client.submit("order", ["x"])

    async def runs_second():
        task = await pipeline.client.get(submitted.id)
        return task if (task.stage, task.state) == ("second", "running") else None

    task = await wait_until(runs_second, what="the second stage is running")
    first, second = task.raw["timeline"]
    assert (first["stage"], first["input"], first["input_size"]) == ("first", ["x"], 5)
    assert (second["stage"], second["input"]) == ("second", ["x", "first"])
    [running] = second["attempts"]
    # Also where its worker chose the number.
    assert running["attempt"] == 0
    assert (running["outcome"], running["finished_at"], running["worker"]) == (None, None, task.raw["worker"])
    assert running["queued_at"] <= running["started_at"]
    # The list of ended attempts has no running one.
    assert [attempt["stage"] for attempt in task.attempts] == ["first"]
    pipeline.held.set()
    [task] = await pipeline.client.results([submitted.id])
    assert [
        (step["step"], step["stage"], step["input"], [attempt["outcome"] for attempt in step["attempts"]])
        for step in task.raw["timeline"]
    ] == [
        (0, "first", ["x"], ["next"]),
        (1, "second", ["x", "first"], ["fail", "next"]),
        (2, "third", ["x", "first", "second"], ["done"]),
    ]
    attempts = [attempt for step in task.raw["timeline"] for attempt in step["attempts"]]
    for attempt in attempts:
        assert attempt["queued_at"] <= attempt["finished_at"]
        assert attempt["started_at"] <= attempt["finished_at"]
        assert attempt["worker"]
    assert [attempt["queued_at"] for attempt in attempts] == sorted(a["queued_at"] for a in attempts)
    assert attempts[1]["error"] == {"kind": "ValueError", "message": "once"}


async def test_what_cannot_be_rerun_is_refused(pipeline, pool, tmp_path):
    """F3: a rerun is refused with its reason: the task has not ended, has not entered the stage or
    belongs to a flow, or the input is missing."""

    async def refused(task_id, stage=None):
        with pytest.raises(RerunRefused) as error:
            await pipeline.client.rerun(task_id, from_stage=stage)
        return error.value.code, str(error.value)

    waiting = await pipeline.client.submit("order", [], run_at=DISTANT)
    assert await refused(waiting.id) == (
        "not_ended",
        f"task {waiting.id} is scheduled: wait for its end, or cancel it first",
    )
    await pipeline.client.cancel([waiting.id])
    code, text = await refused(waiting.id, "second")
    assert (code, text) == (
        "stage_not_reached",
        f"task {waiting.id} has not entered stage 'second', but first",
    )
    # A cancelled task has its first input.
    again = await pipeline.client.rerun(waiting.id)
    assert [*STAGES] == (await pipeline.client.results([again.id]))[0].result

    task = await pipeline.submit(["x" * 50_000])
    ref = task.raw["timeline"][1]["input_ref"]
    path = Path(tmp_path / "objects" / ref["key"])
    path.unlink()
    assert (await refused(task.id, "second"))[0] == "input_missing"
    assert (await pipeline.rerun(task, "first")).result == task.result
    # The rerun has stored it again: objects are named by their content.
    assert path.exists()

    # As a service of the version before writes it.
    await pool.execute("UPDATE attempt SET input_type = NULL, input_ref = NULL WHERE task_id = $1", task.id)
    old = await pipeline.client.get(task.id)
    assert "input_type" not in old.raw["timeline"][0]
    assert (await refused(task.id, "first"))[0] == "input_not_kept"
    assert (await pipeline.rerun(task, "third")).result == task.result

    await pool.execute(
        "UPDATE task SET flow_id = 7, flow_node = 'n', flow_generation = 0 WHERE id = $1", task.id
    )
    assert (await refused(task.id))[0] == "of_flow"
    with pytest.raises(NotFound):
        await pipeline.client.rerun(10**12)


async def test_a_rerun_with_an_idempotency_key_happens_once(pipeline, gateway):
    """F3, T5: a repetition with the same key returns the first rerun; a strict type refuses the key
    for another input."""
    task = await pipeline.submit([])
    body = {"from": "second", "idempotency_key": "again"}
    first = await gateway.post(f"/tasks/{task.id}/rerun", body)
    repeated = await gateway.post(f"/tasks/{task.id}/rerun", body)
    assert (first.status, repeated.status) == (201, 200)
    assert first.headers["Location"] == f"/tasks/{first.body['id']}"
    assert first.body == {
        "id": first.body["id"],
        "created": True,
        "stage": "second",
        "rerun_of": task.id,
    }
    assert repeated.body == {**first.body, "created": False}
    assert (await gateway.post(f"/tasks/{task.id}/rerun", {"stage": "second"})).status == 422
    await pipeline.client.change_type("order", idempotency="strict")
    await pipeline.client.rerun(task.id, from_stage="first", idempotency_key="strict")
    with pytest.raises(IdempotencyConflict):
        await pipeline.client.rerun(task.id, from_stage="third", idempotency_key="strict")


async def test_history_keeps_the_timeline(pipeline, pool, where):
    """F3, O6: a task in history has the same timeline, can be rerun from each stage, and its line
    in the archive has all inputs."""
    tasks_ = [await pipeline.submit(["x" * size]) for size in (10, 50_000)]
    before = [(await pipeline.client.get(task.id)).raw["timeline"] for task in tasks_]
    ids = [task.id for task in tasks_]
    days = [day_of(row["finished_at"]) for row in await pool.fetch("SELECT finished_at FROM task")]
    async with open_session(where["postgres"], "test") as session:
        await history.create_partitions(session, days)
        assert await history.move(session, ids, datetime.now(UTC) + timedelta(minutes=1)) == (2, [])
    assert await pool.fetchval("SELECT count(*) FROM attempt WHERE task_id = ANY ($1)", ids) == 0
    archived = [
        orjson.loads(documents.archived(history.as_task(row)))["timeline"]
        for row in await pool.fetch("SELECT * FROM history ORDER BY id")
    ]
    assert archived == before
    for task, timeline in zip(tasks_, before, strict=True):
        assert (await pipeline.client.get(task.id)).raw["timeline"] == timeline
        for stage in STAGES:
            assert (await pipeline.rerun(task, stage)).result == task.result
