"""Callbacks: deliveries per second and added latency, compared with a bare client.

    python -m benchmarks.callbacks [--calls 3000] [--rounds 15] [--seconds 15]

There are 1, 100 and 10,000 targets. The bare client is an aiohttp loop with the same targets and
the same number of concurrent calls as the callbacks service. It has no queue, database or
signature. Deliveries per second are measured on a backlog, from the first call to the last. Latency
is measured at 20 callbacks per second, from the commit of the row (or the start of a bare call) to
the arrival.
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

from benchmarks.loops import servers_only
from benchmarks.measurements import percentile, report
from penstock.contracts.event import Callback
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.core.target import TargetId
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.processing.outbox import send_callbacks
from penstock.kafka.topology.topics import CALLBACKS
from penstock.local.deployment import Deployment
from penstock.postgres.outbox import callback_columns
from penstock.postgres.queries import bound
from penstock.settings import Kafka

SECRET = "whsec_" + "bmV3" * 8
TARGETS = (1, 100, 10_000)
BATCH_SIZE = 1000
PACE = 20.0
# The service's default number of concurrent calls, to one target and in total.
TARGET_SLOTS, SLOTS = 8, 500
SERVICE = "from penstock.callbacks.app import main; raise SystemExit(main())"


class Environment:
    """The servers, the targets and the clients that write callbacks."""

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

    async def enqueue(self, callbacks: Sequence[Callback]) -> None:
        for at in range(0, len(callbacks), BATCH_SIZE):
            columns = callback_columns(callbacks[at : at + BATCH_SIZE], 600.0)
            await self.connection.execute(*bound("outbox.enqueue_callbacks", **columns))

    async def publish(self, callbacks: Sequence[Callback]) -> None:
        topic = self.settings.prefix + CALLBACKS.name
        await send_callbacks(self.producer, topic, callbacks)

    async def call(self, callback: Callback) -> None:
        headers = {"webhook-id": callback.id, "content-type": "application/json"}
        async with self.client.post(callback.target.url, data=callback.body, headers=headers) as response:
            await response.read()

    async def arrivals(self, count: int) -> dict[str, float]:
        """Waits for `count` arrivals and returns the time of each, by callback id."""
        found: dict[str, float] = {}
        while len(found) < count:
            async with self.client.get(f"{self.url}/_/calls") as response:
                for _path, name, at_s in orjson.loads(await response.read())["calls"]:
                    found.setdefault(name, at_s)
            await asyncio.sleep(0.1)
        return found


async def deliver_bare(place: Environment, targets: int, calls: int) -> float:
    """Deliveries per second of the bare client."""
    left = place.make(targets, calls)

    async def work() -> None:
        while left:
            await place.call(left.pop())

    await asyncio.gather(*(work() for _ in range(min(SLOTS, TARGET_SLOTS * targets))))
    return rate(await place.arrivals(calls))


async def deliver(place: Environment, targets: int, calls: int) -> float:
    """Deliveries per second of the service."""
    callbacks = place.make(targets, calls)
    await place.enqueue(callbacks)
    await place.publish(callbacks)
    return rate(await place.arrivals(calls))


def rate(arrivals: dict[str, float]) -> float:
    return (len(arrivals) - 1) / (max(arrivals.values()) - min(arrivals.values()))


async def latencies(place: Environment, targets: int, seconds: float, *, bare: bool) -> list[float]:
    """Milliseconds from the commit (of a bare call: its start) to the arrival."""
    started_s: dict[str, float] = {}
    callbacks = place.make(targets, int(PACE * seconds))
    begin = time.monotonic()
    for number, callback in enumerate(callbacks):
        await asyncio.sleep(max(0.0, begin + number / PACE - time.monotonic()))
        if not bare:
            await place.enqueue([callback])
        started_s[callback.id] = time.monotonic()
        await (place.call(callback) if bare else place.publish([callback]))
    arrivals = await place.arrivals(len(callbacks))
    return [(at_s - started_s[name]) * 1000 for name, at_s in arrivals.items()]


@asynccontextmanager
async def process(*arguments: str, ready_file: Path, **environment: str) -> AsyncIterator[None]:
    """Starts a process and waits for its ready file."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env={**os.environ, **environment}
    )
    try:
        while not ready_file.exists():  # noqa: ASYNC240 (once, at the start)
            assert started.returncode is None
            await asyncio.sleep(0.05)
        yield
    finally:
        started.terminate()
        await started.wait()


@asynccontextmanager
async def everything(folder: Path) -> AsyncIterator[Environment]:
    """Starts the servers, the targets and the callbacks service."""
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
            process("-m", "benchmarks.targets", str(targets), ready_file=targets),
            process("-c", SERVICE, ready_file=folder / "ready", **environment),
            running(make_producer(settings)) as producer,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=SLOTS)) as client,
        ):
            yield Environment(settings, connection, producer, client, targets.read_text())
        await connection.close()


async def run(calls: int, rounds: int, seconds: float) -> int:
    """Measures both in turn and reports."""
    figures: dict[str, dict[str, Any]] = {}
    ratios = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with everything(Path(folder)) as place:
            for targets in TARGETS:
                # Warm-up: afterwards every target is cached and has a connection.
                await deliver(place, targets, max(200, targets))
                rates: dict[str, list[float]] = {"bare client": [], "Penstock": []}
                late: dict[str, list[float]] = {"bare client": [], "Penstock": []}
                for _ in range(rounds):
                    rates["bare client"].append(await deliver_bare(place, targets, calls))
                    rates["Penstock"].append(await deliver(place, targets, calls))
                    late["bare client"] += await latencies(place, targets, seconds / rounds, bare=True)
                    late["Penstock"] += await latencies(place, targets, seconds / rounds, bare=False)
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
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.calls, arguments.rounds, arguments.seconds)))
