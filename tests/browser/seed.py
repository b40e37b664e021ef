"""Data that shows everything the console can show.

python -m tests.browser.seed URL

"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

TYPES: dict[str, dict[str, Any]] = {
    "media": {"first_stage": "probe"},
    "flaky": {"retry_base_ms": 300, "retry_jitter": 0},
    "broken": {"max_attempts": 1},
    "endless": {"max_per_key": 2},
    "item": {},
    # No worker takes these.
    "idle": {},
    "acme--billing": {},
}
FLOWS: list[dict[str, Any]] = [
    {
        "flow": "release",
        "version": 1,
        "inputs": {"file": {}},
        "nodes": {
            "encode": {"kind": "task", "type": "media", "input": '{"file": inputs.file}'},
            "check": {"kind": "task", "type": "flaky", "after": ["encode"], "input": "{}"},
            "approval": {
                "kind": "wait",
                "event": "release.approved",
                "after": ["check"],
                "finish_within_s": 86400,
            },
            "publish": {
                "kind": "task",
                "type": "media",
                "after": ["approval"],
                "input": '{"file": inputs.file}',
            },
        },
    },
    {
        "flow": "import",
        "version": 1,
        "nodes": {
            "rows": {
                "kind": "map",
                "items": "inputs.rows",
                "parallel": 300,
                "tolerate": 11,
                "each": {"kind": "task", "type": "item", "input": '{"item": item}'},
            },
            "sum": {"kind": "task", "type": "media", "after": ["rows"], "input": '{"file": "sum"}'},
        },
        "inputs": {"rows": {}},
    },
    {
        "flow": "weekly",
        "version": 1,
        "nodes": {
            "wait": {"kind": "timer", "delay_s": 0.1},
            "release": {
                "kind": "flow",
                "flow": "release",
                "after": ["wait"],
                "input": '{"file": "weekly.mp4"}',
            },
        },
    },
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "weekly-berlin": {"flow": "weekly", "cron": "30 2 * * 1", "zone": "Europe/Berlin", "overlap": "skip"},
    "each-minute": {"flow": "weekly", "cron": "* * * * *", "zone": "UTC", "overlap": "skip"},
    "paused-lisbon": {"flow": "weekly", "cron": "0 6 * * *", "zone": "Europe/Lisbon", "paused": True},
}


@asynccontextmanager
async def targets() -> AsyncIterator[str]:
    """Servers of callbacks: `/ok`, `/broken` answers 500, `/hung` never answers."""
    hung = asyncio.Event()

    async def ok(_request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def broken(_request: web.Request) -> web.Response:
        return web.Response(status=500, text="the receiver is broken")

    async def hang(_request: web.Request) -> web.Response:
        await hung.wait()
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/ok", ok), web.post("/broken", broken), web.post("/hung", hang)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        hung.set()
        await runner.cleanup()


class Seed:
    """Fills a deployment.

    Args:
        http: with the gateway's URL as its base.
        target: see `targets`.
    """

    def __init__(self, http: aiohttp.ClientSession, target: str) -> None:
        self._http = http
        self._target = target

    async def post(self, path: str, body: Any, method: str = "POST") -> Any:
        """Sends a request, and returns its answer."""
        async with self._http.request(method, path, json=body) as answer:
            document = await answer.json()
            assert answer.status < 300, (path, document)
            return document

    async def submit(self, type_name: str, context: Any, **fields: Any) -> int:
        """Submits a task, and returns its id."""
        return int((await self.post("/tasks", {"type": type_name, "context": context, **fields}))["id"])

    async def define(self) -> None:
        """Types, definitions of flows, and schedules."""
        for name, settings in TYPES.items():
            await self.post("/types", {"name": name, "partitions": 1, **settings})
        for definition in FLOWS:
            await self.post("/flow-definitions", definition)
        for name, settings in SCHEDULES.items():
            await self.post(f"/schedules/{name}", settings, "PUT")

    async def fill(self) -> dict[str, int]:
        """Tasks and flows; returns the ids of one of each kind."""
        ids = {"done": await self.submit("media", {"file": "intro.mp4"}, labels={"show": "intro"})}
        for number in range(30):
            await self.submit("media", {"file": f"clip-{number}.mp4"}, callbacks=[f"{self._target}/ok"])
        ids["flaky"] = await self.submit("flaky", {"url": "https://example.org"})
        ids["failed"] = await self.submit("broken", {"file": "notes.txt"}, labels={"show": "intro"})
        for number in range(4):
            await self.submit("broken", {"file": f"notes-{number}.txt"})
        ids["running"] = await self.submit("endless", {"number": 0}, key="acme")
        for number in range(1, 3):
            # Two run at a time, and the third waits for its key.
            ids["limited"] = await self.submit("endless", {"number": number}, key="acme")
        ids["ready"] = await self.submit("idle", {"n": 0}, priority="HIGH")
        for number in range(60):
            await self.submit("idle", {"n": number}, priority=("LOW", "MEDIUM")[number % 2])
        ids["scheduled"] = await self.submit("idle", {}, run_at="2126-01-01T00:00:00Z")
        ids["billing"] = await self.submit("acme--billing", {"invoice": 17})
        ids["large"] = await self.submit("media", {"file": "large", "rows": [list(range(20))] * 400})
        for path in ("broken", "hung"):
            for number in range(8):
                await self.submit("media", {"file": f"{path}-{number}"}, callbacks=[f"{self._target}/{path}"])
        flow = {"flow": "release", "inputs": {"file": "trailer.mp4"}, "labels": {"show": "trailer"}}
        ids["waiting_flow"] = (await self.post("/flows", flow))["id"]
        rows = {"flow": "import", "inputs": {"rows": list(range(300))}}
        ids["failed_flow"] = (await self.post("/flows", rows))["id"]
        ids["nested_flow"] = (await self.post("/flows", {"flow": "weekly"}))["id"]
        pause = {"verb": "pause", "filter": {"type": "idle", "priorities": ["LOW"]}, "by": "seed"}
        await self.post("/operations", pause)
        return ids


async def main(url: str) -> None:
    """Fills a deployment, and serves its targets until it is stopped."""
    async with targets() as target, aiohttp.ClientSession(url) as http:
        seed = Seed(http, target)
        await seed.define()
        print(await seed.fill(), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
