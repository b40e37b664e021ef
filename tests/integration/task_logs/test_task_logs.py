"""Task logs end to end on the real Kafka and PostgreSQL: worker, tasklogs, gateway."""

import asyncio
import gzip
import json
import logging
import sys
import time
import tracemalloc
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support import pipeline
from tests.support.gateways import running_gateway
from tests.support.services import read, read_records, running_service, write
from tests.support.waiting import in_time, wait_until

from penstock.contracts.validation import conform
from penstock.core import log_segment
from penstock.gateway import log_reports, log_segments
from penstock.kafka.topology.topics import CALLBACKS, EVENTS, HEARTBEATS, STAGE_RESULTS, TASK_LOGS
from penstock.objects import ObjectStore
from penstock.postgres import types
from penstock.task_logs import retention as retention_module
from penstock.task_logs.app import create_app
from penstock.task_logs.retention import Retention
from penstock.task_logs.settings import TaskLogsSettings
from penstock.worker import Done, Fail, Next, Worker, WorkerSettings

TASK_TYPES = (types.TaskType(name="t", partitions=2, first_stage="start", max_attempts=2, retry_base_ms=10),)

log = logging.getLogger("app")


class Logs:
    """A deployment with one type, a gateway, and the service tasklogs when a test starts it."""

    def __init__(self, system, gateway, objects):
        self.system = system
        self.gateway = gateway
        self.objects = objects

    def service(self, **given):
        settings = TaskLogsSettings(
            **self.system.where,
            postgres=self.system.database,
            objects=self.objects,
            **{"logs_segment_s": 0.5, **given},
        )
        return create_app(settings), settings

    async def lines(self, task, step=0, attempt=0, query=""):
        url = f"{self.gateway.url}/tasks/{task}/logs/{step}/{attempt}?{query}"
        async with self.gateway.session.get(url) as response:
            text = await response.text()
            assert response.status == 200, text
            return [json.loads(line) for line in text.splitlines()]

    async def texts(self, task, *place, query=""):
        return [line["text"] for line in await self.lines(task, *place, query=query)]

    async def runs(self, task):
        return (await self.gateway.get(f"/tasks/{task}/logs")).body["runs"]

    async def segments(self):
        return await self.system.pool.fetch("SELECT * FROM log_segment ORDER BY id")

    @asynccontextmanager
    async def following(self, task, step=0, attempt=0, query="", **headers):
        url = f"{self.gateway.url}/tasks/{task}/logs/{step}/{attempt}?follow=true&{query}"
        async with self.gateway.session.get(url, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            yield events(response)


async def events(response):
    """The events of a stream: (name, id, data)."""
    event = {}
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            yield event["event"], event.get("id"), json.loads(event["data"])
            event = {}


@pytest.fixture
async def logs(where, system):
    await system.start("task-sync", "heartbeats", "stages")
    gateway = await system.stack.enter_async_context(running_gateway(**where))
    await wait_until(gateway.is_ready)
    return Logs(system, gateway, where["objects"])


@asynccontextmanager
async def working(logs, handler, **more):
    worker = Worker(WorkerSettings(**logs.system.where, objects="memory:///"))
    worker.stage("t.start")(handler)
    for name, stage in more.items():
        worker.stage(f"t.{name}")(stage)
    async with running_service(worker.serve):
        yield worker


async def submit(logs, count=1, **fields):
    return await pipeline.submit(logs.system.pool, count, **fields)


async def test_a_log_is_readable_from_the_topic_and_then_from_segments(logs):
    """L2: the same lines, whether they are on the topic, in segments, or partly in each."""

    async def handler(task):
        for n in range(50):
            log.warning("line %s of %s", n, task.id)
        task.log.info("last", frames=3)
        return Done()

    ids = await submit(logs, 20)
    async with working(logs, handler):
        await logs.system.become(succeeded=20)
    expected = {task: [f"line {n} of {task}" for n in range(50)] + ["last"] for task in ids}

    async def read():
        return {task: await logs.texts(task) for task in ids}

    await wait_until(lambda: same(read, expected))
    assert await logs.segments() == []
    service, _settings = logs.service()
    async with running_service(service):
        await wait_until(logs.segments)
        assert await read() == expected

        async def all_stored():
            stored = await logs.segments()
            return sum(row["lines"] for row in stored) == 20 * 51

        await wait_until(all_stored)
    assert await read() == expected
    rows, objects = await logs.segments(), []
    async for page in ObjectStore(logs.objects).pages(rows[0]["object_key"].split("/")[0]):
        objects += [key for key, _at in page]
    # All of it was on the topic: what is stored grows with time and bytes, not with tasks or lines.
    assert len(rows) < 10
    assert sorted(objects) == sorted(row["object_key"] for row in rows)
    found = await logs.lines(ids[0])
    assert [line["line"] for line in found] == list(range(51))
    assert (found[0]["level"], found[0]["source"]) == ("WARNING", "app")
    assert found[-1]["fields"] == {"frames": 3}
    [run] = await logs.runs(ids[0])
    assert (run["lines"], run["state"], run["outcome"], run["dropped_lines"]) == (51, "ended", "done", 0)


async def same(read, expected):
    return await read() == expected


async def test_ranges_levels_search_and_text(logs):
    """L2: HTTP with ranges; the server searches."""

    async def handler(task):
        for n in range(100):
            (log.error if n % 10 == 0 else log.warning)("number %s", n)
        return Done()

    [task] = await submit(logs)
    service, _settings = logs.service()
    async with working(logs, handler), running_service(service):
        await logs.system.become(succeeded=1)
        await wait_until(logs.segments)
    await wait_until(lambda: same(lambda: logs.texts(task), [f"number {n}" for n in range(100)]))
    assert await logs.texts(task, query="from=95") == [f"number {n}" for n in range(95, 100)]
    assert await logs.texts(task, query="from=10&limit=3") == ["number 10", "number 11", "number 12"]
    assert await logs.texts(task, query="tail=2") == ["number 98", "number 99"]
    assert await logs.texts(task, query="level=ERROR&tail=2") == ["number 80", "number 90"]
    assert await logs.texts(task, query="q=NUMBER+9&from=50") == [f"number {n}" for n in range(90, 100)]
    answer = await logs.gateway.get(f"/tasks/{task}/logs/0/0?format=text&limit=1")
    assert answer.body.endswith("ERROR    app number 0\n")
    for query in ("tail=0", "from=-1", "level=LOUD", "tail=1&from=2", "unknown=1", "limit=1000001"):
        assert (await logs.gateway.get(f"/tasks/{task}/logs/0/0?{query}")).status in (400, 422), query
    for path in (f"{task}/logs/5/0", f"{task}/logs/0/7", "999999/logs/0/0", "999999/logs"):
        assert (await logs.gateway.get(f"/tasks/{path}")).status == 404, path


async def test_a_follower_sees_each_line_once_while_it_is_logged(logs):
    """L2: follow goes from segments to the topic without a gap or a repeat, and ends with the
    attempt."""
    go = asyncio.Event()

    async def handler(task):
        for n in range(300):
            log.warning("line %s", n)
            await asyncio.sleep(0.005)
        await go.wait()
        log.warning("last")
        return Done()

    [task] = await submit(logs)
    service, _settings = logs.service(logs_segment_s=0.2)
    async with working(logs, handler), running_service(service):
        await wait_until(logs.segments)
        found, resumed = [], []
        async with logs.following(task) as stream:
            async for name, id_, data in stream:  # noqa: B007 (the last one resumes)
                assert name == "line"
                found.append((data["line"], data["text"]))
                if len(found) == 150:
                    break
        async with logs.following(task, **{"Last-Event-ID": id_}) as stream:
            async for name, _id, data in stream:
                if name == "end":
                    break
                resumed.append((data["line"], data["text"]))
                if len(resumed) == 150:
                    go.set()
        assert data["state"] == "ended"
        assert data["message"] is None
    assert found + resumed == [(n, f"line {n}") for n in range(300)] + [(300, "last")]


async def test_a_line_arrives_soon(logs):
    """L2: a follower that is up to date gets a line while its handler runs."""
    go, seen = asyncio.Event(), asyncio.Event()

    async def handler(task):
        print("ready")
        await go.wait()
        print("now")
        await seen.wait()
        return Done()

    [task] = await submit(logs)
    async with working(logs, handler):
        await wait_until(lambda: logs.runs(task))
        async with logs.following(task) as stream:
            async for _name, _id, data in stream:
                if data.get("text") == "ready":
                    go.set()
                if data.get("text") == "now":
                    seen.set()
                    break
        assert seen.is_set()


def chunk(task, first, *texts, run="a", end=None, attempt=0, at_ms=1785312000000):
    lines = [[at_ms, 20, "stdout", text] for text in texts]
    made = {"id": task, "step": 0, "attempt": attempt, "run": run, "first": first, "lines": lines}
    return {**made, "end": end} if end else made


async def test_repeated_and_missing_lines(logs):
    """L: a repetition by (run, first line) changes nothing, a lower number is trimmed, and a gap
    becomes a mark; also over HTTP, and across segments."""
    [task] = await submit(logs)

    async def ship(*chunks):
        answer = await logs.gateway.post("/logs", {"worker": "w", "chunks": list(chunks)})
        assert answer.status == 202, answer.body
        return answer.body

    service, _settings = logs.service(logs_segment_s=0.1)
    await logs.system.pool.execute("UPDATE task SET created_at = '2026-07-01'")
    async with running_service(service):
        for chunks in (
            [chunk(task, 0, "0", "1"), chunk(task, 0, "0", "1", "2")],
            [chunk(task, 1, "1", "2", "3")],
            [chunk(task, 6, "6", end="done", at_ms=1785315600000)],
            [chunk(task, 6, "6", end="done", at_ms=1785315600000), chunk(999_999, 0, "of no task")],
        ):
            before = len(await logs.segments())
            await ship(*chunks)

            async def stored(before=before):
                return len(await logs.segments()) > before

            await wait_until(stored)
    found = await logs.lines(task)
    assert [line["text"] for line in found if "missing" not in line] == ["0", "1", "2", "3", "6"]
    [gap] = [line for line in found if "missing" in line]
    assert (gap["line"], gap["missing"]) == (4, 2)
    assert await logs.lines(task, query="tail=2") == found[-2:]
    # Lines before a moment are left out before the last ones are chosen, and segments that ended
    # long before it are not read: that is no gap.
    early = "UPDATE log_segment SET begin_at = '2026-07-29 06:00Z', end_at = '2026-07-29 06:00Z'"
    await logs.system.pool.execute(f"{early} WHERE id = (SELECT min(id) FROM log_segment)")
    assert await logs.lines(task, query="since=2026-07-29T08:00:00Z") == found[1:]
    assert await logs.lines(task, query="since=2026-07-29T08:30:00Z") == found[-2:]
    assert await logs.lines(task, query="since=2026-07-29T08:30:00Z&tail=5") == found[-2:]
    shown = await command(logs, "logs", task, "--since", "2026-07-29T08:30:00Z", "--tail", "5", "--json")
    assert [json.loads(line) for line in shown] == found[-2:]


async def test_a_large_log_is_read_block_by_block(logs, monkeypatch):
    """L: a log near the limit, with a line of 1 MB and dropped lines: the gateway holds a small
    part of it in memory, reads the last lines alone for `tail`, and shows what is missing."""
    service, _settings = logs.service(logs_segment_s=0.1)

    async def handler(task):
        print("y" * 1_000_000)
        for n in range(700):
            log.warning("%s %s", n, "x" * 15_900)
        return Done()

    [task] = await submit(logs)

    async def all_stored():
        runs = await logs.runs(task)
        stored = sum(row["lines"] for row in await logs.segments())
        return bool(runs) and runs[0]["outcome"] == "done" and runs[0]["lines"] == stored

    async with working(logs, handler), running_service(service):
        await logs.system.become(succeeded=1)
        await wait_until(all_stored)
    sizes = []

    def decompressed(data):
        raw = log_segment.decompressed(data)
        sizes.append(len(raw))
        return raw

    monkeypatch.setattr(log_segments, "decompressed", decompressed)
    tracemalloc.start()
    try:
        async with logs.gateway.session.get(f"{logs.gateway.url}/tasks/{task}/logs/0/0?q=x") as response:
            async for _data in response.content.iter_chunked(16 * 1024):
                pass
        assert (await logs.gateway.get(f"/tasks/{task}/logs")).status == 200
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(sizes) < 3 * log_segment.BLOCK_BYTES
    # On a busy machine more lines are dropped, so the log has no certain size.
    assert peak < min(4 * 1024 * 1024, sum(sizes) / 2)
    sizes.clear()
    [run] = await logs.runs(task)
    assert run["dropped_lines"] > 0
    assert sizes == [], "totals of segments are read once"
    found = await logs.lines(task)
    assert max(len(line["text"]) for line in found) <= 16 * 1024
    assert [line for line in found if line["source"] == "penstock"], "marks"
    sizes.clear()
    assert await logs.lines(task, query="tail=3") == found[-3:]
    assert sum(sizes) < 4 * log_segment.BLOCK_BYTES


async def test_an_end_that_comes_alone_is_found(logs):
    """L2: the last record of a run may have its end and no line, and be a segment of its own.
    Readers find it, and retention keeps it for as long as the others."""
    [task] = await submit(logs)

    async def queued():
        return await logs.system.states() == {"queued": 1}

    await wait_until(queued)
    service, settings = logs.service(logs_segment_s=0.1)
    now_ms = int(time.time() * 1000)
    lines = {**chunk(task, 0, "first"), "lines": [[now_ms, 20, "stdout", "first"]]}
    async with running_service(service):
        for number, sent in enumerate((lines, chunk(task, 1, end="fail")), 1):
            await logs.gateway.post("/logs", {"worker": "w", "chunks": [sent]})

            async def stored(number=number):
                return len(await logs.segments()) == number

            await wait_until(stored)
        await in_time(Retention(settings, ObjectStore(logs.objects)).round())
    # Long ago, so that the end can no longer come.
    await logs.system.pool.execute(
        "INSERT INTO attempt (task_id, step, attempt, stage, outcome, worker, started_at, finished_at)"
        " VALUES ($1, 0, 0, 'start', 'fail', 'w', now() - interval '2 minutes', now() - interval '1 minute')",
        task,
    )
    await logs.system.pool.execute("UPDATE task SET attempt = 1")
    assert len(await logs.segments()) == 2
    assert await logs.texts(task) == ["first"]


async def test_a_malformed_record_holds_up_nothing(logs):
    """T5: it goes to the rejected topic, with the reason."""
    [task] = await submit(logs)
    topic = f"{logs.system.where['prefix']}task-logs"
    number = task % 2
    kafka = logs.system.where["kafka"]
    await write(
        kafka,
        topic,
        b"{",
        {"worker": "w"},
        {"worker": "w", "chunks": [chunk(task, 0, "good")]},
        partition=number,
    )
    service, _settings = logs.service(logs_segment_s=0.1)
    await logs.system.pool.execute("UPDATE task SET created_at = '2026-07-01'")
    async with running_service(service):
        await wait_until(logs.segments)
    assert await logs.texts(task) == ["good"]
    assert (await logs.gateway.post("/logs", {"worker": "w"})).status == 422


async def test_while_the_object_store_is_away_lines_wait_on_the_topic(logs):
    """L2: `tasklogs` stores nothing without its objects, loses no line, and readers have all lines
    meanwhile."""

    async def handler(task):
        log.warning("line of %s", task.id)
        return Done()

    folder = Path(urlsplit(logs.objects).path)
    service, _settings = logs.service(logs_segment_s=0.1)
    async with working(logs, handler), running_service(service):
        folder.mkdir(exist_ok=True)
        folder.rename(folder.with_name("away"))
        folder.write_text("a file where the folder was")
        ids = await submit(logs, 4)
        await logs.system.become(succeeded=4)
        expected = {task: [f"line of {task}"] for task in ids}

        async def read():
            return {task: await logs.texts(task) for task in ids}

        await wait_until(lambda: same(read, expected))
        assert await logs.segments() == []
        folder.unlink()
        folder.with_name("away").rename(folder)

        async def all_stored():
            return sum(row["lines"] for row in await logs.segments()) == 4

        await wait_until(all_stored)
        assert await read() == expected


async def test_a_gateway_that_cannot_take_lines_says_when_to_come_again(logs, where, monkeypatch):
    """T6: `POST /logs` answers 503 while Kafka is away, and 429 while too much waits for it."""
    [task] = await submit(logs)
    body = {"worker": "w", "chunks": [chunk(task, 0, "line")]}
    monkeypatch.setattr(log_reports, "QUEUE_BYTES", 10)
    async with running_gateway(**{**where, "kafka": "127.0.0.1:1"}) as gateway:
        away = await gateway.post("/logs", body)
        assert (away.status, int(away.headers["Retry-After"]) >= 1) == (503, True)
        waiting, go = asyncio.Event(), asyncio.Event()

        async def send(*_arguments):
            waiting.set()
            await go.wait()

        monkeypatch.setattr(log_reports.LogReportRoutes, "_send", send)
        first = asyncio.create_task(gateway.post("/logs", body))
        await in_time(waiting.wait())
        refused = await gateway.post("/logs", body)
        assert (refused.status, int(refused.headers["Retry-After"]) >= 1) == (429, True)
        go.set()
        assert (await first).status == 202


async def test_two_replicas_store_each_line_once(logs):
    """O1: replicas come and go, and the loser of a partition stores nothing twice."""

    async def handler(task):
        for n in range(30):
            log.warning("line %s", n)
            await asyncio.sleep(0.01)
        return Done()

    ids = await submit(logs, 30)
    async with working(logs, handler):
        for _ in range(3):
            one, _settings = logs.service(logs_segment_s=0.1)
            two, _settings = logs.service(logs_segment_s=0.1)
            async with running_service(one), running_service(two):
                before = len(await logs.segments())

                async def more(before=before):
                    ended = await logs.system.states() == {"succeeded": 30}
                    return ended or len(await logs.segments()) > before

                await wait_until(more)
        await logs.system.become(succeeded=30)
        last, _settings = logs.service(logs_segment_s=0.1)
        async with running_service(last):

            async def all_stored():
                return sum(row["lines"] for row in await logs.segments()) >= 900

            await wait_until(all_stored)
    assert sum(row["lines"] for row in await logs.segments()) == 900
    assert {task: await logs.texts(task) for task in ids} == {
        task: [f"line {n}" for n in range(30)] for task in ids
    }
    rows = await logs.segments()
    for number in (0, 1):
        offsets = [(row["first_offset"], row["next_offset"]) for row in rows if row["partition"] == number]
        assert all(before[1] <= after[0] for before, after in pairwise(offsets))


async def test_retention_deletes_segments_and_orphans(logs, monkeypatch):
    """L: after `logs_days` row and object are gone; an object without a row is swept, and one that
    was just stored is not."""

    async def handler(task):
        print("line")
        return Done()

    await submit(logs)
    service, settings = logs.service(logs_segment_s=0.1)
    async with working(logs, handler), running_service(service):
        await logs.system.become(succeeded=1)
        await wait_until(logs.segments)
    [row] = await logs.segments()
    store = ObjectStore(logs.objects)
    folder = row["object_key"].rpartition("/")[0]
    await store.put(f"{folder}/0-0-orphan.gz", b"x")
    retention = Retention(settings, store)
    await in_time(retention.round())
    assert (retention.expired, retention.swept) == (0, 0)
    monkeypatch.setattr(retention_module, "ORPHAN_AGE", retention_module.timedelta(seconds=-60))
    await in_time(retention.round())
    assert (retention.expired, retention.swept) == (0, 1)
    assert await store.size_of(row["object_key"]) == row["size"]
    await logs.system.pool.execute("UPDATE log_segment SET end_at = now() - interval '31 days'")
    await in_time(retention.round())
    assert (retention.expired, await logs.segments()) == (1, [])
    assert await store.size_of(row["object_key"]) is None


async def test_a_deleted_log_is_hidden_at_once(logs):
    async def handler(task):
        print("line")
        return Done()

    [task, other] = await submit(logs, 2)
    async with working(logs, handler):
        await logs.system.become(succeeded=2)
    await wait_until(lambda: same(lambda: logs.texts(task), ["line"]))
    async with logs.gateway.session.delete(f"{logs.gateway.url}/tasks/{task}/logs") as response:
        assert (response.status, await response.json()) == (200, {"id": task, "deleted": True})
    assert (await logs.gateway.get(f"/tasks/{task}/logs")).status == 404
    assert (await logs.gateway.get(f"/tasks/{task}/logs/0/0")).status == 404
    assert await logs.texts(other) == ["line"]


async def test_the_log_of_a_lost_worker_says_so(logs):
    """W8, L2: the log of a worker that vanished stays, and its end says what may be missing."""
    [task] = await submit(logs)

    async def queued():
        return await logs.system.states() == {"queued": 1}

    await wait_until(queued)
    await logs.gateway.post("/logs", {"worker": "w", "chunks": [chunk(task, 0, "about to die")]})
    await logs.system.pool.execute("UPDATE task SET created_at = '2026-07-01'")
    # As the heartbeat processor ends it.
    await logs.system.pool.execute(
        "INSERT INTO attempt (task_id, step, attempt, stage, outcome, worker, started_at, finished_at)"
        " VALUES ($1, 0, 0, 'start', 'expired', 'w', '2026-07-29', '2026-07-29')",
        task,
    )
    await logs.system.pool.execute("UPDATE task SET state = 'quarantined', attempt = 1, finished_at = now()")
    lost = "worker lost; the last 250 ms may be missing"
    assert await logs.texts(task) == ["about to die", lost]
    assert [run["state"] for run in await logs.runs(task)] == ["lost"]
    async with logs.following(task) as stream:
        found = [(name, data) async for name, _id, data in stream]
    assert found[0][1]["text"] == "about to die"
    assert (found[-1][0], found[-1][1]["state"], found[-1][1]["message"]) == ("end", "lost", lost)


async def test_a_run_without_its_end_says_so(logs):
    """W8, L2: a worker dies before its attempt is claimed, and another one runs the attempt; or a
    worker is lost before it has logged anything. A mark tells of each."""
    [task] = await submit(logs)

    async def queued():
        return await logs.system.states() == {"queued": 1}

    await wait_until(queued)
    both = [chunk(task, 0, "first run", run="a"), chunk(task, 0, "second run", run="b", end="done")]
    await logs.gateway.post("/logs", {"worker": "w", "chunks": both})
    moment = "'2026-07-29'::timestamptz"
    await logs.system.pool.execute("UPDATE task SET created_at = '2026-07-01'")
    insert = (
        "INSERT INTO attempt (task_id, step, attempt, stage, outcome, worker, started_at, finished_at)"
        " VALUES ($1, 0, $2, 'start', $3, 'w', {0}, {1})"
    )
    await logs.system.pool.execute(insert.format(moment, "now()"), task, 0, "fail")
    await logs.system.pool.execute("UPDATE task SET attempt = 2")
    assert await logs.texts(task) == ["first run", "second run"], "its end may still come"
    await logs.system.pool.execute("UPDATE attempt SET finished_at = started_at")
    found = await logs.lines(task)
    assert [(line["run"], line["line"], line["text"]) for line in found] == [
        ("a", 0, "first run"),
        ("b", 0, "second run"),
        ("a", None, "the last lines of this attempt did not arrive"),
    ]
    assert len(await logs.lines(task, query="run=b")) == 1
    await logs.system.pool.execute(insert.format(moment, moment), task, 1, "expired")
    [mark] = await logs.lines(task, 0, 1)
    assert (mark["run"], mark["text"]) == (None, "worker lost; the last 250 ms may be missing")
    assert await logs.lines(task, 0, 1, query="run=b") == []


async def command(logs, *arguments):
    """Runs `penstock` and returns the lines of its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", *map(str, arguments), "--gateway", logs.gateway.url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await in_time(process.communicate())
    assert process.returncode == 0, errors.decode()
    return output.decode().splitlines()


async def test_the_command_follows_a_task_through_its_attempts_and_stages(logs):
    """L1, L2: each attempt and each stage has a log of its own, which stays readable. `penstock
    logs ID -f` prints all of them, and ends with the task."""

    async def handler(task):
        print("attempt", task.attempt)
        return Fail("again") if task.attempt == 0 else Next("other")

    async def other(task):
        log.warning("other stage \x1b[31m")
        return Done()

    [task] = await submit(logs)
    follows = asyncio.create_task(command(logs, "logs", task, "-f"))
    async with working(logs, handler, other=other):
        found = await follows
    texts = [line.split(" ", 2)[2].strip() for line in found]
    assert texts == [
        "stdout attempt 0",
        "penstock Fail: again",
        "stdout attempt 1",
        "app other stage \ufffd[31m",
    ]
    assert await logs.texts(task, 0, 0) == ["attempt 0", "Fail: again"]
    assert await logs.texts(task, 0, 1) == ["attempt 1"]
    runs = [(run["step"], run["attempt"], run["stage"], run["outcome"]) for run in await logs.runs(task)]
    assert runs == [(0, 0, "start", "fail"), (0, 1, "start", "next"), (1, 0, "other", "done")]
    shown = [
        json.loads(line)["text"] for line in await command(logs, "logs", task, "--json", "--grep", "ATTEMPT")
    ]
    assert shown == ["attempt 0", "attempt 1"]
    assert len(await command(logs, "logs", task, "--level", "ERROR", "--since", "1h")) == 1


async def test_a_failed_attempt_tells_why(logs):
    """L2: the log, the error of the attempt, `get`, `why`, events and callbacks tell why it failed:
    each with a bound, without secrets, and with the way to the log."""

    async def handler(task):
        raise ValueError("\n".join([*["x" * 100] * 300, "with password=planted-secret at the end"]))

    [task] = await submit(logs, events="all", callbacks=("http://127.0.0.1:9/",))
    async with working(logs, handler):
        await logs.system.become(failed=1)
        await wait_until(lambda: logs.runs(task))
    paths = [f"/tasks/{task}/logs/0/{attempt}" for attempt in (0, 1)]
    end = "with password=[redacted] at the end"
    document = (await logs.gateway.get(f"/tasks/{task}")).body
    assert [attempt["log"] for attempt in document["attempts"]] == paths
    for error in (document["error"], *(attempt["error"] for attempt in document["attempts"])):
        assert error["traceback"].endswith(f"{end}\n")
        assert len(error["message"]) == 2_000
        assert 19_000 < len(error["traceback"]) <= 20_000
    for path in paths:
        text = (await logs.gateway.get(f"{path}?format=text")).body
        assert text.endswith(f"{end}\n")
        assert len(text) < 50_000

    async def published():
        prefix, kafka = logs.system.where["prefix"], logs.system.where["kafka"]
        events = await read(kafka, f"{prefix}{EVENTS.name}")
        callbacks = await read(kafka, f"{prefix}{CALLBACKS.name}")
        found = [*events, *(json.loads(each["body"]) for each in callbacks)]
        return found if len(found) == 4 else None

    found = await wait_until(published)
    assert [each["event"] for each in found] == ["task.retried", "task.failed"] * 2
    assert [each["error"]["log"] for each in found] == paths * 2
    for each in found:
        conform(each, "event")
        error = each["error"]
        assert error["traceback"].endswith(f"{end}\n")
        assert (len(error["message"]), len(error["traceback"])) == (2_000, 500)
    why = (await logs.gateway.get(f"/tasks/{task}/why")).body["figures"]
    assert (why["log"], why["traceback"]) == (paths[1], document["error"]["traceback"][-500:])
    hint = f"penstock logs {task} --step 0 --attempt 1"
    for verb in (["get"], ["tasks", "why"]):
        shown = await command(logs, *verb, task)
        assert end in shown
        assert shown[-1].endswith(hint)
    shown = await command(logs, *hint.split()[1:])
    assert shown[-1].endswith(end)
    assert "planted" not in json.dumps([document, found, why, shown])


async def everything_written(logs):
    """The bytes of records with their headers, of all segments, and of the rows of tasks."""
    prefix, kafka = logs.system.where["prefix"], logs.system.where["kafka"]
    data = []
    for topic in (TASK_LOGS, HEARTBEATS, STAGE_RESULTS, EVENTS, CALLBACKS):
        for record in await read_records(kafka, f"{prefix}{topic.name}"):
            data += [record.value or b"", *(value for _name, value in record.headers)]
    store = ObjectStore(logs.objects)
    for row in await logs.segments():
        # Without the eight bytes behind the index.
        data.append(gzip.decompress(await store.range(row["object_key"], 0, row["size"] - 8)))
    for table in ("task", "attempt", "task_progress", "callback"):
        rows = await logs.system.pool.fetch(f"SELECT found::text AS row FROM {table} AS found")
        data += [row["row"].encode() for row in rows]
    return b"\n".join(data)


@pytest.mark.parametrize("transport", ["kafka", "http"])
async def test_a_planted_secret_is_written_nowhere(logs, monkeypatch, transport):
    """L: a handler or its command logs, prints, raises or reports a secret, or a program ships one
    by itself. It is in no record, no callback, no segment and no row."""
    monkeypatch.setenv("STORE_PASSWORD", "planted-environment")
    if transport == "kafka":
        settings = WorkerSettings(**logs.system.where, objects="memory:///")
    else:
        settings = WorkerSettings(worker_gateway=logs.gateway.url)
    worker = Worker(settings)
    worker.redact("planted-registered")
    secrets = "planted-environment planted-registered"

    async def reported():
        return await logs.system.pool.fetchval("SELECT message FROM task_progress")

    @worker.stage("t.start", max_attempts=1)
    async def start(task):
        print("printed", secrets)
        log.warning("logged %s", secrets, extra={"value": secrets})
        task.log.info("structured", value=secrets)
        task.progress(0.5, f"reported {secrets}")
        await task.run(["sh", "-c", "echo ran $STORE_PASSWORD; echo also $STORE_PASSWORD >&2"])
        await wait_until(reported)
        raise ValueError(f"raised {secrets}")

    [task] = await submit(logs, events="all", callbacks=("http://127.0.0.1:9/",))
    service, _settings = logs.service(logs_segment_s=0.1)
    async with running_service(service):
        async with running_service(worker.serve):
            await logs.system.become(failed=1)
        shipped = chunk(task, 0, "password=planted-by-name", "Authorization: Bearer planted.bearer")
        shipped["lines"][0].append({"api_key": "planted-by-field"})
        answer = await logs.gateway.post("/logs", {"worker": "w", "chunks": [shipped]})
        assert answer.status == 202

        async def all_stored():
            stored = await logs.segments()
            return sum(row["runs"] for row in stored) >= 2 and sum(row["lines"] for row in stored) >= 8

        await wait_until(all_stored)
    ran = {line["text"] for line in await logs.lines(task) if line["source"] == "sh"}
    assert ran == {"ran [redacted]", "also [redacted]"}
    data = await everything_written(logs)
    assert data.count(b"[redacted]") >= 14
    assert b"planted" not in data


async def test_a_worker_without_kafka_ships_through_its_gateway(logs):
    """L1, T6: lines of a worker over HTTP, with the end of their run."""
    worker = Worker(WorkerSettings(worker_gateway=logs.gateway.url))

    @worker.stage("t.start")
    async def start(task):
        print("over HTTP")
        return Done()

    [task] = await submit(logs)
    async with running_service(worker.serve):
        await logs.system.become(succeeded=1)
        await wait_until(lambda: same(lambda: logs.texts(task), ["over HTTP"]))
    [run] = await logs.runs(task)
    assert (run["state"], run["outcome"], run["worker"]) == ("ended", "done", worker.id)
