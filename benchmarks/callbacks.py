"""Callbacks: deliveries a second and added latency, for 1, 100 and 10,000 targets, against a bare client in the same run.

    python -m benchmarks.callbacks [--calls 3000] [--rounds 15] [--seconds 15]

The bare client is an aiohttp loop with as many calls under way as the callbacks service may have, to the same targets,
with no queue, no database and no signature. Deliveries a second: a backlog on the topic, from its first call to its
last. Latency: at 20 callbacks a second, from the commit of the row (the beginning of a bare call) to the arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import asyncpg
import orjson

from benchmarks.figures import percentile, report
from benchmarks.loops import servers_only
from penstock.contracts.event import Callback
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.core.target import TargetId
from penstock.kafka.connection import make_producer, running
from penstock.kafka.outbox import send_callbacks
from penstock.kafka.topics import CALLBACKS
from penstock.local.deployment import Deployment
from penstock.postgres.advance import callback_columns
from penstock.postgres.queries import query
from penstock.settings import Kafka

SECRET = "whsec_" + "bmV3" * 8
TARGETS = (1, 100, 10_000)
AT_A_TIME = 1000
PACE = 20.0
# By default the service has so many calls under way to one target, and to all.
TARGET_SLOTS, SLOTS = 8, 500
SERVICE = "from penstock.callbacks.app import main; raise SystemExit(main())"


class Place:
    """Servers, targets, and what has been owed."""

    def __init__(self, settings: Kafka, connection: Any, producer: Any, client: Any, url: str) -> None:
        self.settings = settings
        self.connection = connection
        self.producer = producer
        self.client = client
        self.url = url
        self._number = 0

    def make(self, targets: int, calls: int) -> list[Callback]:
        made = []
        for _ in range(calls):
            self._number += 1
            body = orjson.dumps({"id": self._number, "event": "task.succeeded", "pad": "x" * 160})
            target = f"{self.url}/t{targets}/{self._number % targets}"
            made.append(
                Callback(
                    id=f"msg_{self._number}",
                    target=TargetId(DEFAULT_NAMESPACE, target),
                    task_id=self._number,
                    attempt=0,
                    body=body,
                )
            )
        return made

    async def owe(self, callbacks: Sequence[Callback]) -> None:
        for at in range(0, len(callbacks), AT_A_TIME):
            columns = callback_columns(callbacks[at : at + AT_A_TIME], 600.0)
            await self.connection.execute(query("outbox.owe_callbacks"), *columns)

    async def publish(self, callbacks: Sequence[Callback]) -> None:
        topic = self.settings.prefix + CALLBACKS.name
        await send_callbacks(self.producer, topic, callbacks)

    async def call(self, callback: Callback) -> None:
        headers = {"webhook-id": callback.id, "content-type": "application/json"}
        async with self.client.post(callback.target.url, data=callback.body, headers=headers) as response:
            await response.read()

    async def arrivals(self, count: int) -> dict[str, float]:
        """When each came, once so many have come."""
        found: dict[str, float] = {}
        while len(found) < count:
            async with self.client.get(f"{self.url}/_/calls") as response:
                for _path, name, at_s in orjson.loads(await response.read())["calls"]:
                    found.setdefault(name, at_s)
            await asyncio.sleep(0.1)
        return found


async def deliver_bare(place: Place, targets: int, calls: int) -> float:
    """Deliveries a second of the bare client."""
    left = place.make(targets, calls)

    async def work() -> None:
        while left:
            await place.call(left.pop())

    await asyncio.gather(*(work() for _ in range(min(SLOTS, TARGET_SLOTS * targets))))
    return rate(await place.arrivals(calls))


async def deliver(place: Place, targets: int, calls: int) -> float:
    """Deliveries a second of the service."""
    callbacks = place.make(targets, calls)
    await place.owe(callbacks)
    await place.publish(callbacks)
    return rate(await place.arrivals(calls))


def rate(arrivals: dict[str, float]) -> float:
    return (len(arrivals) - 1) / (max(arrivals.values()) - min(arrivals.values()))


async def linger(place: Place, targets: int, seconds: float, *, bare: bool) -> list[float]:
    """Milliseconds from commit, or from the call's beginning, to arrival, at a steady pace."""
    begun: dict[str, float] = {}
    callbacks = place.make(targets, int(PACE * seconds))
    begin = time.monotonic()
    for number, callback in enumerate(callbacks):
        await asyncio.sleep(max(0.0, begin + number / PACE - time.monotonic()))
        if not bare:
            await place.owe([callback])
        begun[callback.id] = time.monotonic()
        await (place.call(callback) if bare else place.publish([callback]))
    arrivals = await place.arrivals(len(callbacks))
    return [(at_s - begun[name]) * 1000 for name, at_s in arrivals.items()]


@asynccontextmanager
async def process(*arguments: str, mark: Path, **environment: str) -> AsyncIterator[None]:
    """A process, from its mark on."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env={**os.environ, **environment}
    )
    try:
        while not mark.exists():  # noqa: ASYNC240 (a start, once)
            assert started.returncode is None
            await asyncio.sleep(0.05)
        yield
    finally:
        started.terminate()
        await started.wait()


@asynccontextmanager
async def everything(folder: Path) -> AsyncIterator[Place]:
    """Servers, targets and the callbacks service."""
    async with Deployment(servers_only(folder)) as deployment:
        settings = Kafka.load(deployment.environment)
        environment = {
            **deployment.environment,
            "PENSTOCK_CALLBACK_SECRETS": SECRET,
            "PENSTOCK_READY_FILE": str(folder / "ready"),
            "PENSTOCK_LOG_LEVEL": "WARNING",
        }
        connection = await asyncpg.connect(deployment.postgres, server_settings={"search_path": "penstock"})
        targets = folder / "targets"
        async with (
            process("-m", "benchmarks.targets", str(targets), mark=targets),
            process("-c", SERVICE, mark=folder / "ready", **environment),
            running(make_producer(settings)) as producer,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=SLOTS)) as client,
        ):
            yield Place(settings, connection, producer, client, targets.read_text())
        await connection.close()


async def run(calls: int, rounds: int, seconds: float) -> int:
    """Runs both in turn and reports."""
    figures: dict[str, dict[str, Any]] = {}
    ratios = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with everything(Path(folder)) as place:
            for targets in TARGETS:
                # Each target is loaded, and has a connection, before anything is measured.
                await deliver(place, targets, max(200, targets))
                rates: dict[str, list[float]] = {"bare client": [], "Penstock": []}
                late: dict[str, list[float]] = {"bare client": [], "Penstock": []}
                for _ in range(rounds):
                    rates["bare client"].append(await deliver_bare(place, targets, calls))
                    rates["Penstock"].append(await deliver(place, targets, calls))
                    late["bare client"] += await linger(place, targets, seconds / rounds, bare=True)
                    late["Penstock"] += await linger(place, targets, seconds / rounds, bare=False)
                for name, found in rates.items():
                    figures[f"{name}, {targets:,} targets"] = {
                        "deliveries/s": round(median(found)),
                        "p50 (ms)": round(percentile(late[name], 0.5), 1),
                        "p99 (ms)": round(percentile(late[name], 0.99), 1),
                    }
                pairs = zip(rates["Penstock"], rates["bare client"], strict=True)
                ratios[targets] = median(ours / theirs for ours, theirs in pairs)
                print(f"{targets:,} targets: {ratios[targets]:.2f} of the bare client", file=sys.stderr)
    return report(
        "callbacks",
        figures,
        {
            f"{targets:,} targets: at least half the bare client": (f"{ratio:.2f}", ratio >= 0.5)
            for targets, ratio in ratios.items()
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=15)
    given = parser.parse_args()
    sys.exit(asyncio.run(run(given.calls, given.rounds, given.seconds)))
