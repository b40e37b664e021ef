"""Kills between the steps of a commit lose no result and repeat no effect (O1, guarantee 6)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from tests.support.services import read, running_service, write
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.result import StageResult, encode_results
from penstock.contracts.submission import Submission
from penstock.core.completion import Fence, Outcome
from penstock.postgres import release, tasks, types
from penstock.postgres.session import open_session
from penstock.stages.app import create_app
from penstock.stages.settings import StagesSettings

TYPE = types.TaskType(name="t", partitions=1)
TASK_TYPES = (TYPE,)


@pytest.fixture
def settings(where: dict[str, str]) -> StagesSettings:
    return StagesSettings(**where, sweep_age_s=1.0, sweep_every_s=0.3)


async def queued(
    pool: asyncpg.Pool[asyncpg.Record], settings: StagesSettings, *submissions: Submission
) -> list[Fence]:
    await tasks.submit(pool, list(submissions))
    async with open_session(settings.postgres, "test") as session:
        batch = (await release.release(session, TYPE, len(submissions), [])).batch
    assert batch is not None
    return [ready.fence for ready in batch.tasks]


def advanced(fence: Fence) -> StageResult:
    return StageResult(
        fence=fence, outcome=Outcome.NEXT, next_stage="two", started_ms=1, finished_ms=2, context=None
    )


@asynccontextmanager
async def stages_process(settings: StagesSettings, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The service as a process of its own, killed at the end."""
    ready = folder / "ready"
    environ = {
        **os.environ,
        "PENSTOCK_KAFKA": settings.kafka,
        "PENSTOCK_PREFIX": settings.prefix,
        "PENSTOCK_POSTGRES": settings.postgres,
        "PENSTOCK_SESSION_TIMEOUT_S": "6",
        "PENSTOCK_READY_FILE": str(ready),
    }
    command = "from penstock.stages.app import main; raise SystemExit(main())"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", command, env=environ)
    try:
        await wait_until(lambda: ready.exists() or process.returncode is not None, what="ready")
        assert process.returncode is None
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def test_a_kill_between_transitions_without_and_with_events(
    settings: StagesSettings, pool: asyncpg.Pool[asyncpg.Record], tmp_path: Path
) -> None:
    """W4, O1: transitions without events are committed before those with events. A process that is
    killed between the two repeats the record: each transition has taken effect once, each event is
    published."""
    context = Context.encode({})
    quiet, told = await queued(
        pool,
        settings,
        Submission(type="t", context=context),
        Submission(type="t", context=context, events="all"),
    )
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND application_name = 'penstock stages' AND datname = current_database()"
    )

    async def stage(fence: Fence) -> str:
        return str(await pool.fetchval("SELECT stage FROM task WHERE id = $1", fence.id))

    async with (
        stages_process(settings, tmp_path) as process,
        pool.acquire() as connection,
        connection.transaction(),
    ):
        # The second transaction waits here, after the first one.
        await connection.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        await write(
            settings.kafka,
            f"{settings.prefix}stage-results",
            encode_results("w", [advanced(quiet), advanced(told)]),
            key=b"w",
        )
        await wait_until(lambda: pool.fetchval(waits), what="the second transaction waits")
        assert await stage(quiet) == "two"
        assert await stage(told) == told.stage
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with running_service(create_app(settings)):

        async def moved() -> bool:
            return await stage(told) == "two"

        await wait_until(moved, what="the record is delivered again")
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 0 FROM outbox"), what="published")
    rows = await pool.fetch("SELECT task_id, step, attempt, outcome FROM attempt ORDER BY task_id")
    assert [tuple(row) for row in rows] == [(quiet.id, 0, 0, "next"), (told.id, 0, 0, "next")]
    [event] = await read(settings.kafka, f"{settings.prefix}events")
    assert event["id"] == f"{told.id}-0-0-advanced"
