"""Reports on Kafka need the token of their attempt: guessed ids claim, prolong and end nothing.

Each forger writes what the user of another namespace's worker may write: records on heartbeats and
stage-results, with the right task, step and attempt.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.services import producing, read, read_records, running_service
from tests.support.waiting import wait_until

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.progress import Progress
from penstock.contracts.report_tokens import HEADER
from penstock.contracts.result import StageResult, encode_results
from penstock.contracts.task_log import chunk_to_wire, encode_record
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.core.log_chunk import Chunk, RunId
from penstock.core.report_tokens import ReportTokens
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.postgres import types
from penstock.task_logs.app import create_app as create_tasklogs
from penstock.task_logs.settings import TaskLogsSettings
from penstock.worker import Done, RetryAfter, Worker, WorkerSettings

TASK_TYPES = (types.TaskType(name="t", partitions=2, max_attempts=3, retry_base_ms=1),)
KEY = base64.b64encode(b"k" * 32).decode()
# A forger can send nothing, nonsense, or the tokens of its own attempts.
FORGED = ("", "0" * 16, "é,\0,,")


@pytest.fixture
async def system(system: System) -> System:
    await create_topics(system.settings(), [ready("t", 2)])
    system.of_services = {"report_keys": (KEY,)}
    await system.start("task-sync", "heartbeats", "stages")
    return system


@pytest.fixture
async def forger(system: System) -> AsyncIterator["Forger"]:
    async with producing(system.where["kafka"]) as producer:
        yield Forger(system, producer)


class Forger:
    """A worker of another namespace, which guesses what it may not read."""

    def __init__(self, system: System, producer: AIOKafkaProducer) -> None:
        self._system = system
        self._producer = producer

    async def write(
        self, topic: str, value: bytes, token: str | None = None, partition: int | None = None
    ) -> None:
        headers = [] if token is None else [(HEADER, token.encode())]
        name = f"{self._system.where['prefix']}{topic}"
        await self._producer.send_and_wait(name, value, key=b"forger", headers=headers, partition=partition)

    async def end(self, fence: Fence, token: str | None = None) -> None:
        """Reports each kind of result, and a malformed one, which would become a failure."""
        for outcome in (Outcome.DONE, Outcome.FAIL, Outcome.HANDED_BACK):
            await self.write(
                "stage-results", encode_results("forger", [StageResult(fence=fence, outcome=outcome)]), token
            )
        bare = b'{"id":%d,"step":%d,"attempt":%d}' % fence.attempt_id
        await self.write("stage-results", b'{"worker":"forger","results":[%b]}' % bare, token)

    async def hold(self, attempt_id: AttemptId, worker: str, token: str | None = None) -> None:
        """Claims and prolongs an attempt, and reports its progress."""
        for kind in (Kind.CLAIM, Kind.BEAT):
            await self.write("heartbeats", Heartbeat(kind, worker, 600_000, [attempt_id]).encode(), token)
        reported = Heartbeat(Kind.BEAT, worker, 600_000, [], progress={attempt_id: Progress(0.9, "forged")})
        [progress] = reported.headers()
        name = f"{self._system.where['prefix']}heartbeats"
        await self._producer.send_and_wait(name, reported.encode(), key=b"forger", headers=[progress])

    async def rejected(self, topic: str, count: int) -> list[Any]:
        """Waits until so many reports were refused, each with the reason."""
        name = f"{self._system.where['prefix']}{topic}.rejected"

        async def all_refused() -> list[Any] | None:
            # A malformed entry is refused for its form, too.
            found = [
                each for each in await read(self._system.where["kafka"], name) if HEADER in each["reason"]
            ]
            return found if len(found) >= count else None

        found: list[Any] = await wait_until(all_refused, what=f"{count} refusals on {name}")
        return found


async def row(system: System, task_id: int) -> tuple[Any, ...]:
    found = await system.pool.fetchrow("SELECT state, attempt, worker FROM task WHERE id = $1", task_id)
    return tuple(found)


async def test_a_guessed_id_neither_claims_nor_ends_a_queued_attempt(system, forger) -> None:
    """O5: claims, heartbeats, progress and results with the right task, step and attempt, and with
    a wrong token or none, change nothing. The task runs on its own worker afterwards."""
    [task_id] = await system.submit(1)
    await system.become(queued=1)
    fence = Fence(task_id, 0, "start", 0)
    [record] = await system.records()
    own = ReportTokens((KEY,)).of(AttemptId(task_id + 1, 0, 0))
    forged = [None, *FORGED, own, record["token"][:-1], record["token"].swapcase()]
    for token in forged:
        await forger.hold(fence.attempt_id, "forger", token)
        await forger.end(fence, token)
    await forger.rejected("stage-results", 4 * len(forged))
    await forger.rejected("heartbeats", 3 * len(forged))
    assert await row(system, task_id) == ("queued", 0, None)
    assert await system.pool.fetchval("SELECT count(*) FROM task_progress") == 0
    await system.work()
    await system.become(succeeded=1)
    assert system.executed == {task_id: 1}


async def test_a_guessed_id_neither_prolongs_nor_ends_a_running_attempt(system, forger) -> None:
    """O5: reports of a foreign worker on a running attempt change nothing, also under the id of the
    attempt's own worker. Its own worker proves claims, heartbeats, results and ends of leases."""
    go_on = asyncio.Event()
    worker = Worker(WorkerSettings(**system.where, objects="memory:///"))

    @worker.stage("t.start")
    async def start(task):
        await go_on.wait()
        return RetryAfter(0) if task.attempt == 0 else Done()

    async with running_service(worker.serve):
        [task_id] = await system.submit(1)
        await system.become(running=1)
        before = await row(system, task_id)
        fence = Fence(task_id, 0, "start", 0)
        await forger.hold(fence.attempt_id, before[2])
        await forger.hold(fence.attempt_id, "forger")
        await forger.end(fence)
        release = Heartbeat(Kind.RELEASE, before[2], 0, [fence.attempt_id])
        await forger.write("heartbeats", release.encode())
        await forger.rejected("stage-results", 4)
        await forger.rejected("heartbeats", 6)
        assert await row(system, task_id) == before
        go_on.set()
        await system.become(succeeded=1)
    # Nothing that the worker itself reported was refused.
    assert len(await forger.rejected("stage-results", 4)) == 4
    assert len(await forger.rejected("heartbeats", 6)) == 6
    kinds = {
        each["kind"] for each in await read(system.where["kafka"], f"{system.where['prefix']}heartbeats")
    }
    assert kinds == {"claim", "beat", "release"}


async def test_the_token_of_an_earlier_attempt_is_none_of_the_next(system, forger) -> None:
    """O5: after an attempt was repeated, its token proves nothing about the next attempt."""
    [task_id] = await system.submit(1)
    await system.become(queued=1)
    [record] = await system.records()
    fence = Fence(task_id, 0, "start", 0)
    again = encode_results("w", [StageResult(fence=fence, outcome=Outcome.RETRY, delay_ms=0)])
    await forger.write("stage-results", again, record["token"])

    async def is_next() -> bool:
        return await row(system, task_id) == ("queued", 1, None)

    await wait_until(is_next, what="the next attempt is queued")
    await forger.end(fence._replace(attempt=1), record["token"])
    await forger.hold(AttemptId(task_id, 0, 1), "forger", record["token"])
    await forger.rejected("stage-results", 4)
    await forger.rejected("heartbeats", 3)
    assert await is_next()


async def test_a_record_is_judged_by_its_entries(system, forger) -> None:
    """O5: in one record, a result with its token counts, and one without it does not."""
    mine, other = await system.submit(2)
    await system.become(queued=2)
    tokens = {record["id"]: record["token"] for record in await system.records()}
    results = [StageResult(fence=Fence(each, 0, "start", 0), outcome=Outcome.DONE) for each in (other, mine)]
    await forger.write("stage-results", encode_results("w", results), tokens[mine])
    await forger.rejected("stage-results", 1)
    await system.become(succeeded=1, queued=1)
    assert (await row(system, other))[0] == "queued"


async def test_lines_of_a_foreign_attempt_are_in_no_log(system, where, forger) -> None:
    """O5, L2: lines with the ids of an attempt and without its token are in none of its logs,
    neither from the topic nor from segments. Lines of its worker are, also over HTTP."""
    gateway = await system.stack.enter_async_context(running_gateway(**where, report_keys=(KEY,)))
    await wait_until(gateway.is_ready)
    worker = Worker(WorkerSettings(**system.where, objects="memory:///"))

    @worker.stage("t.start")
    async def start(task):
        task.log.info("own")
        return Done()

    async with running_service(worker.serve):
        [task_id] = await system.submit(1)
        await system.become(succeeded=1)
    chunk = Chunk(RunId(task_id, 0, 0, "forged"), "forger", 0, [(0, 20, "stdout", "forged")], "done")
    await forger.write("task-logs", encode_record("forger", [chunk]), partition=task_id % 2)
    shipped = {"worker": "h", "chunks": [chunk_to_wire(replace(chunk, run=RunId(task_id, 0, 0, "http")))]}
    assert (await gateway.post("/logs", shipped)).body["accepted"] == 1

    async def runs() -> set[str]:
        found = (await gateway.get(f"/tasks/{task_id}/logs")).body["runs"]
        return {each["worker"] for each in found}

    async def has_both() -> bool:
        return "h" in await runs() and len(await runs()) == 2

    await wait_until(has_both, what="the lines of both workers are on the topic")
    settings = TaskLogsSettings(**where, report_keys=(KEY,), logs_segment_s=0.5)
    async with running_service(create_tasklogs(settings)):
        await wait_until(lambda: system.pool.fetchval("SELECT count(*) > 0 FROM log_segment"))
        rejected = f"{where['prefix']}task-logs.rejected"
        await wait_until(lambda: read(where["kafka"], rejected), what="the forged lines are refused")
        assert "forger" not in await runs()


@pytest.mark.parametrize("keys", [(KEY,), ()], ids=["with tokens", "without"])
async def test_workers_over_http_need_no_token(system, where, keys) -> None:
    """O5: the gateway proves claims, heartbeats and results of its workers, and gives out no token.
    Without the keys of the services it can report nothing."""
    gateway = await system.stack.enter_async_context(running_gateway(**where, report_keys=keys))
    await wait_until(gateway.is_ready)
    [task_id] = await system.submit(1)
    await system.become(queued=1)

    async def hold() -> list[Any]:
        answer = await gateway.post("/hold_task", {"worker": "w", "type": "t", "wait_s": 5})
        found: list[Any] = answer.body["tasks"]
        return found

    [task] = await wait_until(hold, what="the gateway returns the task")
    assert "token" not in task
    attempt = {name: task[name] for name in ("id", "step", "stage", "attempt")}
    beat = {**attempt, "outcome": "progress", "progress": {"fraction": 0.5}}
    for entry in (beat, {**attempt, "outcome": "done"}):
        answer = await gateway.post("/set_task", {"worker": "w", "results": [entry]})
        assert answer.body["accepted"] == 1, answer.body
    if keys:
        await system.become(succeeded=1)
    rejected = f"{where['prefix']}stage-results.rejected"

    async def is_refused() -> bool:
        return bool(await read_records(where["kafka"], rejected))

    if not keys:
        await wait_until(is_refused)
        assert (await row(system, task_id))[0] == "queued"
    else:
        assert not await is_refused()
        assert not await read_records(where["kafka"], f"{where['prefix']}heartbeats.rejected")
