"""The deployment that is measured, its definitions, and what every case does with it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import orjson
import psutil

from benchmarks.loops import everything
from benchmarks.measurements import CpuMeter
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.local.deployment import METRICS_PORT, Deployment
from penstock.postgres import tasks
from penstock.postgres import types as registry
from penstock.postgres.connection import open_pool
from penstock.postgres.flow_starts import FlowStart, start

# The figures of a case, by row and column.
Figures = dict[str, dict[str, float]]
# For each claim the measured value as text, and whether the claim holds.
Claims = dict[str, tuple[str, bool]]

DEPTH = 50
BATCH = 1_000
# The bound of an owner's transaction, as the histogram of its metric has it.
OWNER_BOUND_S = "0.1"
_METRICS_PORT = 29_400
_TRANSACTIONS = re.compile(r'^penstock_flow_transaction_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


def _task(*after: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "task", "type": "step", "after": list(after), **fields}


def _definitions() -> dict[str, dict[str, Any]]:
    each = {"kind": "task", "type": "step", "input": "item"}
    nodes: dict[str, dict[str, Any]] = {
        "chain": {"a": _task(), "b": _task("a", input="nodes.a.output"), "c": _task("b")},
        "fan": {"m": {"kind": "map", "items": "inputs.items", "parallel": 100_000, "each": each}},
        "join": {
            "m": {"kind": "map", "items": "inputs.items", "parallel": 100_000, "each": each},
            "last": _task("m"),
        },
        "wait": {"w": {"kind": "wait", "event": "go", "key": "string(flow.id)"}, "t": _task("w")},
        "tick": {"t": _task()},
    }
    for level in range(DEPTH):
        child = {"sub": {"kind": "flow", "flow": f"level{level + 1}", "after": ["t"]}}
        nodes[f"level{level}"] = {"t": _task(), **(child if level + 1 < DEPTH else {})}
    return {
        name: {"flow": name, "version": 1, "nodes": of_flow}
        | ({"inputs": {"items": {}}} if name in ("fan", "join") else {})
        for name, of_flow in nodes.items()
    }


@dataclass(frozen=True)
class OwnerCost:
    """The cost of the service `flows` since the meter began.

    Attributes:
        cpu_s: seconds of processor time.
        transactions: that had messages.
        slow: those of them that took longer than `OWNER_BOUND_S`.
    """

    cpu_s: float
    transactions: int
    slow: int


class OwnerMeter:
    """Measures the service `flows` by its metrics and its processor time."""

    def __init__(self, deployment: Deployment) -> None:
        self._port = deployment.metrics_ports["flows"]
        self._cpu = CpuMeter([deployment.processes["flows"]])
        self._before = self._read()

    def cost(self) -> OwnerCost:
        """The cost so far."""
        now = self._read()
        done, quick = (now[bound] - self._before[bound] for bound in ("+Inf", OWNER_BOUND_S))
        return OwnerCost(self._cpu.seconds(), round(done), round(done - quick))

    def _read(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as response:
            text = response.read().decode()
        return {bound: float(count) for bound, count in _TRANSACTIONS.findall(text)}


class Bench:
    """The deployment that is measured."""

    def __init__(self, deployment: Deployment, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self.deployment = deployment
        self.pool = pool
        self.definitions = _definitions()
        self.versions = dict.fromkeys(self.definitions, 1)

    async def prepare(self) -> None:
        """Registers types and definitions."""
        for name in ("step", "stages", "spawn"):
            await registry.register(self.pool, registry.TaskType(name=name, first_stage="one"))
        for name, document in self.definitions.items():
            await self.pool.execute(
                "INSERT INTO penstock.flow_definition (name, version, definition) VALUES ($1, 1, $2)",
                name,
                orjson.dumps(document).decode(),
            )

    @contextmanager
    def worker(self, pool: int = 2_000) -> Iterator[None]:
        """Runs a worker with so many slots."""
        environment = {**os.environ, **self.deployment.environment, "PENSTOCK_POOL": str(pool)}
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.flows.worker"], env=environment)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def owner_meter(self) -> OwnerMeter:
        """A meter of the service `flows`, which begins now."""
        return OwnerMeter(self.deployment)

    def owner_mib(self) -> float:
        """Resident memory of the service `flows`."""
        return float(psutil.Process(self.deployment.processes["flows"]).memory_info().rss / 2**20)

    async def submit(
        self, count: int, type_name: str = "step", *, first: int = 0, **fields: Any
    ) -> list[int]:
        """Submits plain tasks; their contexts are numbers from `first`."""
        ids: list[int] = []
        for begin in range(0, count, BATCH):
            batch = [
                Submission(type=type_name, context=Context.encode(first + number), **fields)
                for number in range(begin, min(begin + BATCH, count))
            ]
            ids += [submitted.id for submitted in await tasks.submit(self.pool, batch)]
        return ids

    async def start(self, name: str, count: int = 1, inputs: Mapping[str, Any] | None = None) -> list[int]:
        """Starts flows."""
        ids: list[int] = []
        given = FlowStart(
            name=name,
            version=1,
            versions=self.versions if name.startswith("level") else None,
            unfinished=len(self.definitions[name]["nodes"]),
            inputs=Context.encode(inputs or {}),
        )
        for begin in range(0, count, BATCH):
            started = await start(self.pool, [given] * min(BATCH, count - begin))
            ids += [each.id for each in started]
        return ids

    async def until(self, statement: str, *arguments: Any) -> float:
        """Waits until a statement returns true; returns the moment."""
        while not await self.pool.fetchval(statement, *arguments):
            await asyncio.sleep(0.02)
        return time.perf_counter()

    async def tasks_done(self, ids: Sequence[int]) -> float:
        """Waits until plain tasks have succeeded."""
        statement = "SELECT count(*) = $2 FROM penstock.task WHERE id = ANY ($1) AND state = 'succeeded'"
        return await self.until(statement, ids, len(ids))

    async def flows_done(self, ids: Sequence[int]) -> float:
        """Waits until flows have succeeded."""
        statement = "SELECT count(*) = $2 FROM penstock.flow WHERE id = ANY ($1) AND status = 'succeeded'"
        return await self.until(statement, ids, len(ids))


@asynccontextmanager
async def running_bench() -> AsyncIterator[Bench]:
    """A prepared deployment of all services, without a worker."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        options = replace(everything(folder), environment={METRICS_PORT: str(_METRICS_PORT)})
        deployment = await stack.enter_async_context(Deployment(options))
        pool = await stack.enter_async_context(open_pool(deployment.postgres, "benchmark", size=2))
        bench = Bench(deployment, pool)
        await bench.prepare()
        yield bench
