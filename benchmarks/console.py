"""The console: its size, lists with a million tasks, and what 2,000 live streams cost.

    python -m benchmarks.console [--tasks N] [--streams N] [--rounds N]

Claims are those of a worker over HTTP at the gateway that serves the streams, which watch the lists
and a task each. Rounds with and without streams alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import asyncpg
import psutil

from benchmarks.measurements import percentile, report
from penstock.gateway.console import console_folder
from penstock.local.deployment import Deployment, Options

MOST_BYTES = 120 * 1024
_CHANGES = 100
_CLAIMS = 150


def script_bytes() -> int:
    """Compressed bytes of all scripts of the built console."""
    folder = console_folder()
    assert folder is not None, "run `make console` first"
    return sum(len(gzip.compress(file.read_bytes())) for file in folder.rglob("*.js"))


class Site:
    """A deployment under measurement.

    Args:
        http: with the gateway's URL as its base.
        gateway: process of the gateway.
    """

    def __init__(self, http: aiohttp.ClientSession, gateway: int) -> None:
        self._http = http
        self._gateway = psutil.Process(gateway)

    def memory_mib(self) -> float:
        """Memory of the gateway."""
        return float(self._gateway.memory_info().rss / 2**20)

    async def post(self, path: str, body: Any) -> Any:
        """Sends a request, and returns its answer."""
        async with self._http.post(path, json=body) as answer:
            document = await answer.json()
            assert answer.status < 300, document
            return document

    async def get_s(self, path: str) -> float:
        """Seconds of a read."""
        begin_s = time.perf_counter()
        async with self._http.get(path) as answer:
            await answer.read()
            assert answer.status == 200
        return time.perf_counter() - begin_s

    async def submit(self) -> int:
        """Submits a task of the worker over HTTP."""
        return int((await self.post("/tasks", {"type": "claimed", "context": 1}))["id"])

    async def claims_ms(self) -> list[float]:
        """Milliseconds from an acknowledged submission to its claim by a worker over HTTP."""
        found = []
        for _ in range(_CLAIMS):
            await self.submit()
            begin_s = time.perf_counter()
            held = (await self.post("/hold_task", {"worker": "w", "type": "claimed", "wait_s": 30}))["tasks"]
            found.append((time.perf_counter() - begin_s) * 1000)
            results = [
                {name: task[name] for name in ("id", "step", "stage", "attempt")} | {"outcome": "done"}
                for task in held
            ]
            await self.post("/set_task", {"worker": "w", "results": results})
        return found

    async def told_ms(self) -> list[float]:
        """Milliseconds from the answer of a change to the event of an open stream."""
        found = []
        for _ in range(_CHANGES):
            task = int((await self.post("/tasks", {"type": "idle", "context": 1}))["id"])
            async with self._http.get(f"/live?topics=task:{task}", timeout=None) as stream:
                # The first look at a task is an event, too.
                await _changed(stream)
                await self.post(f"/tasks/{task}/cancel", {})
                begin_s = time.perf_counter()
                await _changed(stream)
                found.append((time.perf_counter() - begin_s) * 1000)
        return found

    async def open_streams(self, stack: AsyncExitStack, count: int, task: int) -> list[asyncio.Task[None]]:
        """Opens streams, and reads them."""

        async def read(stream: aiohttp.ClientResponse) -> None:
            async for _ in stream.content.iter_any():
                pass

        readers = []
        for begin in range(0, count, 100):
            opened = await asyncio.gather(
                *(
                    stack.enter_async_context(
                        self._http.get(f"/live?topics=overview,operations,task:{task}", timeout=None)
                    )
                    for _ in range(min(100, count - begin))
                )
            )
            readers += [asyncio.ensure_future(read(stream)) for stream in opened]
        return readers


async def _changed(stream: aiohttp.ClientResponse) -> None:
    """Returns with the next event of a stream."""
    while not (await stream.content.readline()).startswith(b"event: changed"):
        pass


async def fill(dsn: str, tasks: int) -> None:
    """Inserts ended tasks, as a deployment has after some days."""
    connection = await asyncpg.connect(dsn, server_settings={"search_path": "penstock"})
    await connection.execute(
        "INSERT INTO task (type, state, stage, priority, content_type, context, created_at, updated_at, finished_at)"
        " SELECT 'old', 'succeeded', 'start', 2, 'json', '1'::bytea, now() - make_interval(secs => n),"
        " now() - make_interval(secs => n), now() - make_interval(secs => n) FROM generate_series(1, $1::int) AS n",
        tasks,
        timeout=600,
    )
    await connection.execute("ANALYZE task")
    await connection.close()


async def measure(options: Options, given: argparse.Namespace) -> int:
    """Runs all measurements, and writes the result file."""
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        Deployment(options) as deployment,
        aiohttp.ClientSession(deployment.gateway_url, connector=connector) as http,
    ):
        site = Site(http, deployment.processes["gateway"])
        for name in ("old", "idle", "claimed"):
            await site.post("/types", {"name": name, "partitions": 1})
        await fill(deployment.postgres, given.tasks)
        lists = {
            "first list s": await site.get_s("/tasks?limit=50"),
            "of a type s": await site.get_s("/tasks?type=old&limit=50"),
            "failed s": await site.get_s("/tasks?state=failed&limit=50"),
            "overview s": await site.get_s("/overview"),
        }
        told = await site.told_ms()
        task = await site.submit()
        without, with_streams, memory = [], [], []
        for _ in range(given.rounds):
            without += await site.claims_ms()
            before = site.memory_mib()
            async with AsyncExitStack() as stack:
                readers = await site.open_streams(stack, given.streams, task)
                await asyncio.sleep(2)
                memory.append((site.memory_mib() - before) * 1024 / given.streams)
                with_streams += await site.claims_ms()
                for reader in readers:
                    reader.cancel()
    ratio = median(with_streams) / median(without)
    size = script_bytes()
    figures = {
        "size": {"JavaScript KiB": round(size / 1024, 1)},
        f"lists with {given.tasks:,} tasks": {name: round(value, 3) for name, value in lists.items()},
        "event to stream": {"p50 ms": round(median(told)), "p95 ms": round(percentile(told, 0.95))},
        f"{given.streams:,} streams": {
            "claim p50 ms": round(median(with_streams), 2),
            "without ms": round(median(without), 2),
            "ratio": round(ratio, 3),
            "KiB a stream": round(max(memory), 1),
        },
    }
    claims = {
        "JavaScript: at most 120 KB compressed": (f"{size / 1024:.0f} KiB", size <= MOST_BYTES),
        "first list within 1 s": (f"{lists['first list s']:.3f}", lists["first list s"] < 1),
        "overview within 1 s": (f"{lists['overview s']:.3f}", lists["overview s"] < 1),
        "event to stream: p95 below 500 ms": (f"{percentile(told, 0.95):.0f}", percentile(told, 0.95) < 500),
        "streams cost claims less than 5 % of latency": (f"{(ratio - 1) * 100:+.1f} %", ratio < 1.05),
    }
    return report("console", figures, claims)


def main() -> int:
    """Parses the command line and runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=1_000_000, help="ended tasks (%(default)s)")
    parser.add_argument("--streams", type=int, default=2_000, help="open streams (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds with and without streams (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-console-") as folder:
        return asyncio.run(measure(Options(data_dir=Path(folder), gateway_port=0), given))


if __name__ == "__main__":
    sys.exit(main())
