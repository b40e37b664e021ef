"""Metrics, probes and log lines of workers on the real Kafka."""

import asyncio
import os
import signal
import sys
import threading
from contextlib import AsyncExitStack, suppress

import aiohttp
import orjson
import pytest
from tests.support.gateways import running_gateway
from tests.support.scraping import scrape
from tests.support.services import make_topics, producing, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.local.ports import choose_port
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.worker import Done, Fail, RetryAfter, Worker, WorkerSettings


@pytest.fixture
async def topics(kafka_servers, prefix):
    kafka = await make_topics(kafka_servers, prefix)
    await create_topics(kafka, [ready("t", 1)])
    return {"kafka": kafka_servers, "prefix": prefix}


async def release(topics, *stages):
    async with producing(topics["kafka"]) as producer:
        for number, stage in enumerate(stages, 1):
            record = ReadyTask(Fence(number, 0, stage, 0), "t", Context.encode(None), 60_000)
            await producer.send(f"{topics['prefix']}ready.t", record.encode())
        await producer.flush()


async def answer(port, path):
    """Status and document; (0, None) while the port is closed."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"http://127.0.0.1:{port}{path}") as found:
                return found.status, await found.json()
        except aiohttp.ClientConnectionError:
            return 0, None


async def test_a_worker_has_metrics_and_probes(topics):
    """O4: attempts by outcome, what runs and waits; a handler that blocks the event loop fails no
    probe, and is counted."""
    port = choose_port()
    worker = Worker(WorkerSettings(**topics, objects="memory:///", worker_metrics_port=port, pool=1))
    blocks, go_on = threading.Event(), threading.Event()

    @worker.stage("t.done")
    async def done(task):
        return Done()

    @worker.stage("t.fails")
    def fails(task):
        return Fail("x")

    @worker.stage("t.again")
    async def again(task):
        return RetryAfter(1)

    @worker.stage("t.blocks")
    async def blocking(task):
        blocks.set()
        assert go_on.wait(60)
        return Done()

    await release(topics, "done", "done", "fails", "again", "nowhere")
    attempts = "penstock_worker_attempts_total"
    # Labels are in the order of their names.
    expected = {
        (attempts, "done", "done", "t"): 2,
        (attempts, "fail", "fails", "t"): 1,
        (attempts, "retry", "again", "t"): 1,
        (attempts, "handed_back", "", "t"): 1,
    }

    async def counted():
        found = await scrape(port)
        return found if expected.items() <= found.items() else None

    async with running_service(worker.serve):
        found = await wait_until(counted)
        assert found["penstock_worker_slots",] == 1
        assert found["penstock_worker_running", "blocks", "t"] == 0
        assert found["penstock_worker_log_lines_dropped_total", "rate"] == 0
        assert found["penstock_check_ok", "kafka"] == 1
        assert await answer(port, "/readyz") == (200, {"status": "ready", "checks": {"kafka": "ok"}})
        # In a thread that runs before the handler: it blocks the loop of this test.
        seen = asyncio.get_running_loop().run_in_executor(None, asyncio.run, while_blocked(port, go_on))
        await release(topics, "blocks")
        assert await seen == (200, 200, 1)
        assert blocks.is_set()
    assert (await answer(port, "/livez"))[0] == 0


async def while_blocked(port, go_on):
    """Statuses of the probes, and running handlers, while one of them blocks the event loop."""

    async def blocked():
        found = await scrape(port)
        return found if found["penstock_worker_blocked_total", "blocks", "t"] else None

    try:
        found = await wait_until(blocked)
        live, is_ready = [(await answer(port, path))[0] for path in ("/livez", "/readyz")]
        return live, is_ready, found["penstock_worker_running", "blocks", "t"]
    finally:
        go_on.set()


async def test_a_worker_over_http_is_ready_while_the_gateway_accepts_it(topics, database):
    """O4: the check is that of its gateway; a worker that stops is not ready."""
    port = choose_port()
    began, go_on = asyncio.Event(), asyncio.Event()
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(database, "test"))
        await types.register(pool, types.TaskType(name="t", partitions=1))
        gateway = await stack.enter_async_context(
            running_gateway(**topics, postgres=database, objects="memory:///")
        )
        await wait_until(gateway.is_ready)
        worker = Worker(WorkerSettings(**topics, worker_gateway=gateway.url, worker_metrics_port=port))

        @worker.stage("t.s")
        async def handler(task):
            began.set()
            await go_on.wait()
            return Done()

        stopping, is_ready = asyncio.Event(), asyncio.Event()
        running = asyncio.ensure_future(worker.serve(stopping, is_ready.set))
        stack.callback(running.cancel)
        await is_ready.wait()
        assert await answer(port, "/readyz") == (200, {"status": "ready", "checks": {"gateway": "ok"}})
        await release(topics, "s")
        await began.wait()
        stopping.set()

        async def stops():
            status, document = await answer(port, "/readyz")
            return status == 503 and document

        assert (await wait_until(stops))["checks"] == {"gateway": "the worker is stopping"}
        assert (await answer(port, "/livez"))[0] == 200
        go_on.set()
        await running


PROGRAM = """
import logging
from penstock.worker import Done, Worker
worker = Worker(kafka={kafka!r}, prefix={prefix!r}, objects="memory:///")

@worker.stage("t.s")
async def handler(task):
    logging.getLogger("shop").info("charged %s", 5, extra={{"card": "visa"}})
    await task.run(["true"])
    return Done()

@worker.stage("t.sync")
def blocks(task):
    logging.getLogger("shop").warning("from a thread", extra={{"stage": "mine"}})
    return Done()

worker.run()
"""


async def started(program, **environment):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PENSTOCK_LOG_FORMAT": "json", **environment},
    )


async def stop(process):
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_json_log_lines_of_handlers_have_the_ids_of_their_task(topics):
    """O4: those of both kinds of handlers; a field of the line itself has precedence, and lines of
    the worker have none."""
    await release(topics, "s", "sync")
    process = await started(PROGRAM.format(**topics))
    try:
        lines = {}
        while not {"charged 5", "from a thread"} <= lines.keys():
            line = orjson.loads(await process.stderr.readline())
            lines[line["message"]] = line
    finally:
        await stop(process)
    ids = {"task": 1, "step": 0, "stage": "s", "attempt": 0, "task_type": "t"}
    charged = lines["charged 5"]
    assert {name: charged[name] for name in ids} == ids
    assert (charged["service"], charged["logger"], charged["card"]) == ("worker", "shop", "visa")
    threaded = lines["from a thread"]
    assert (threaded["task"], threaded["stage"], threaded["attempt"]) == (2, "mine", 0)
    assert "task" not in lines["The process is ready"]


async def test_a_worker_that_waits_for_kafka_is_alive_and_not_ready(topics):
    """O4: its supervisor does not end it for an outage, and people see the reason."""
    port = choose_port()
    away = {**topics, "kafka": f"127.0.0.1:{choose_port()}"}
    process = await started(PROGRAM.format(**away), PENSTOCK_WORKER_METRICS_PORT=str(port))
    try:

        async def answers():
            status, document = await answer(port, "/readyz")
            return status and (status, document)

        status, document = await wait_until(answers)
        assert (status, document["status"]) == (503, "not ready")
        assert "127.0.0.1" in document["checks"]["kafka"]

        async def alive():
            return (await answer(port, "/livez"))[0] == 200

        await wait_until(alive)

        async def scraped():
            # Between two attempts to reach Kafka the port is closed for a moment.
            with suppress(aiohttp.ClientConnectionError):
                return await scrape(port)

        assert (await wait_until(scraped))["penstock_check_ok", "kafka"] == 0
        process.send_signal(signal.SIGTERM)
    finally:
        await stop(process)
