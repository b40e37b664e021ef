"""Flows beside the same number of plain tasks, in one run on an embedded deployment.

    python -m benchmarks.flows [--chains 3000] [--items 100000] [--nested 1000] [--waiting 20000]

Each flow is compared with plain tasks that the same worker runs, so the figures are ratios. The
times between nodes are those of the attempts: from the end of a handler to the start of the next.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import orjson
import psutil

from benchmarks.loops import everything
from benchmarks.measurements import report
from penstock.contracts.context import Context
from penstock.contracts.flow_submission import FlowEvent
from penstock.contracts.submission import Submission
from penstock.core.task import Priority
from penstock.local.deployment import Deployment
from penstock.postgres import tasks
from penstock.postgres import types as registry
from penstock.postgres.connection import open_pool
from penstock.postgres.flow_events import deliver
from penstock.postgres.flow_starts import FlowStart, start

DEPTH = 50
JOIN = 1_000
# The last item of a join ends so long after all others.
LAST_S = 0.5
BATCH = 1_000


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
    }
    for level in range(DEPTH):
        child = {"sub": {"kind": "flow", "flow": f"level{level + 1}", "after": ["t"]}}
        nodes[f"level{level}"] = {"t": _task(), **(child if level + 1 < DEPTH else {})}
    return {
        name: {"flow": name, "version": 1, "nodes": of_flow}
        | ({"inputs": {"items": {}}} if name in ("fan", "join") else {})
        for name, of_flow in nodes.items()
    }


class Bench:
    """The deployment that is measured."""

    def __init__(self, deployment: Deployment, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self.deployment = deployment
        self.pool = pool
        self.definitions = _definitions()
        self.versions = dict.fromkeys(self.definitions, 1)

    async def prepare(self) -> None:
        """Registers types and definitions."""
        for name in ("step", "stages"):
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
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.flow_worker"], env=environment)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    async def submit(self, count: int, type_name: str = "step", **fields: Any) -> list[int]:
        """Submits plain tasks."""
        ids: list[int] = []
        for begin in range(0, count, BATCH):
            batch = [
                Submission(type=type_name, context=Context.encode(number), **fields)
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

    def owner_mib(self) -> float:
        """Resident memory of the service `flows`."""
        return float(psutil.Process(self.deployment.processes["flows"]).memory_info().rss / 2**20)


async def chains(bench: Bench, count: int) -> dict[str, float]:
    """Tasks per second of plain tasks and of chains of three."""
    begin = time.perf_counter()
    plain = (await bench.tasks_done(await bench.submit(3 * count))) - begin
    begin = time.perf_counter()
    chained = (await bench.flows_done(await bench.start("chain", count))) - begin
    return {"plain tasks/s": 3 * count / plain, "chained tasks/s": 3 * count / chained}


async def steps(bench: Bench, count: int) -> dict[str, float]:
    """Milliseconds from one stage to the next, and from one node to the next, when idle."""
    staged: list[float] = []
    chained: list[float] = []
    for _ in range(count):
        ids = await bench.submit(1, "stages")
        await bench.tasks_done(ids)
        rows = await bench.pool.fetch(
            "SELECT started_at, finished_at FROM penstock.attempt WHERE task_id = $1 ORDER BY step", ids[0]
        )
        staged += _gaps(rows)
        [flow_id] = await bench.start("chain")
        await bench.flows_done([flow_id])
        rows = await bench.pool.fetch(
            """SELECT a.started_at, a.finished_at FROM penstock.attempt a JOIN penstock.task t ON t.id = a.task_id
               WHERE t.flow_id = $1 ORDER BY t.flow_node""",
            flow_id,
        )
        chained += _gaps(rows)
    return {"stage to stage ms": median(staged), "node to node ms": median(chained)}


def _gaps(rows: Sequence[asyncpg.Record]) -> list[float]:
    return [
        (following["started_at"] - before["finished_at"]).total_seconds() * 1000
        for before, following in itertools.pairwise(rows)
    ]


async def fan_out(bench: Bench, items: int) -> dict[str, float]:
    """A fan-out beside as many plain tasks, and an urgent task in its middle."""
    begin = time.perf_counter()
    plain = (await bench.tasks_done(await bench.submit(items))) - begin
    before = bench.owner_mib()
    begin = time.perf_counter()
    [flow_id] = await bench.start("fan", inputs={"items": list(range(items))})
    first = await bench.until(
        "SELECT true FROM penstock.task WHERE flow_id = $1 AND state = 'succeeded' LIMIT 1", flow_id
    )
    urgent_begin = time.perf_counter()
    urgent = await bench.tasks_done(await bench.submit(1, priority=Priority.HIGHEST))
    total = (await bench.flows_done([flow_id])) - begin
    return {
        "items/s": items / total,
        "plain tasks/s": items / plain,
        "of plain": total / plain,
        "first item s": first - begin,
        "urgent task s": urgent - urgent_begin,
        "memory MiB": bench.owner_mib() - before,
    }


async def join(bench: Bench, count: int) -> dict[str, float]:
    """Milliseconds from the last end of 1,000 items to the start of the node behind them.

    Once the last item ends alone, and once all end at the same moment. Then the last result waits
    for the commit of those before it, as that of a plain task does: `burst commit ms` of the total.
    """
    figures: dict[str, float] = {}
    for name, last in (("join", LAST_S), ("burst", 0)):
        waited, committed = [], []
        for _ in range(count):
            [flow_id] = await bench.start("join", inputs={"items": [*range(JOIN - 1), last]})
            await bench.flows_done([flow_id])
            row = await bench.pool.fetchrow(
                """SELECT max(a.finished_at) FILTER (WHERE t.flow_item IS NOT NULL) AS ended,
                          max(t.finished_at) FILTER (WHERE t.flow_item IS NOT NULL) AS committed,
                          max(a.started_at) FILTER (WHERE t.flow_item IS NULL) AS started
                   FROM penstock.attempt a JOIN penstock.task t ON t.id = a.task_id WHERE t.flow_id = $1""",
                flow_id,
            )
            assert row is not None
            waited.append((row["started"] - row["ended"]).total_seconds() * 1000)
            committed.append((row["committed"] - row["ended"]).total_seconds() * 1000)
        figures |= {f"{name} ms": median(waited), f"{name} commit ms": median(committed)}
    return figures


async def nested(bench: Bench, count: int) -> dict[str, float]:
    """Flows nested 50 deep with one slot, beside as many plain tasks."""
    begin = time.perf_counter()
    plain = (await bench.tasks_done(await bench.submit(count * DEPTH))) - begin
    begin = time.perf_counter()
    deep = (await bench.flows_done(await bench.start("level0", count))) - begin
    return {
        "nested tasks/s": count * DEPTH / deep,
        "plain tasks/s": count * DEPTH / plain,
        "of plain": deep / plain,
    }


async def waiting(bench: Bench, count: int) -> dict[str, float]:
    """Flows that wait for an event: their size, and how soon they go on."""
    size = "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c WHERE c.relname LIKE 'flow%' AND c.relkind = 'r'"
    await bench.pool.execute("VACUUM")
    before = await bench.pool.fetchval(size)
    ids = await bench.start("wait", count)
    await bench.until("SELECT count(*) = $1 FROM penstock.flow_wait", count)
    grown = float(await bench.pool.fetchval(size) - before)
    woken = []
    ready = asyncio.Event()
    connection = await asyncpg.connect(bench.deployment.postgres)
    await connection.add_listener("penstock_ready", lambda *_: ready.set())
    for flow_id in ids[:: max(1, count // 20)]:
        ready.clear()
        begin = time.perf_counter()
        await deliver(bench.pool, [FlowEvent(id=str(flow_id), event="go", key=str(flow_id))])
        await ready.wait()
        woken.append((time.perf_counter() - begin) * 1000)
        await bench.flows_done([flow_id])
    await connection.close()
    return {"bytes a flow": grown / count, "woken ms": median(woken)}


async def run(arguments: argparse.Namespace) -> int:
    """Measures everything in one deployment and reports."""
    figures: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        deployment = await stack.enter_async_context(Deployment(everything(folder)))
        pool = await stack.enter_async_context(open_pool(deployment.postgres, "benchmark", size=2))
        bench = Bench(deployment, pool)
        await bench.prepare()
        with bench.worker():
            await bench.tasks_done(await bench.submit(500))
            await bench.flows_done(await bench.start("chain", 50))
            for name, work in (
                ("chains of three", chains(bench, arguments.chains)),
                ("from node to node", steps(bench, 25)),
                ("join of 1,000", join(bench, 7)),
                ("fan-out", fan_out(bench, arguments.items)),
                ("waiting", waiting(bench, arguments.waiting)),
            ):
                figures[name] = await work
                print(name, figures[name], file=sys.stderr)
        with bench.worker(pool=1):
            figures["nested 50 deep, one slot"] = await nested(bench, arguments.nested)
            print(figures["nested 50 deep, one slot"], file=sys.stderr)
    chained = figures["chains of three"]["chained tasks/s"] / figures["chains of three"]["plain tasks/s"]
    step = figures["from node to node"]["node to node ms"] / figures["from node to node"]["stage to stage ms"]
    fan, deep = figures["fan-out"], figures["nested 50 deep, one slot"]
    claims = {
        "chains: at least 0.5 of plain tasks": (f"{chained:.2f}", chained >= 0.5),
        "node to node: at most 1.6 times stage to stage": (f"{step:.2f}", step <= 1.6),
        "join of 1,000: at most 25 ms": (
            f"{figures['join of 1,000']['join ms']:.1f}",
            figures["join of 1,000"]["join ms"] <= 25,
        ),
        "fan-out: first item within 0.5 s": (f"{fan['first item s']:.2f}", fan["first item s"] <= 0.5),
        "fan-out: at most 1.3 times plain tasks": (f"{fan['of plain']:.2f}", fan["of plain"] <= 1.3),
        "nested: at most 1.3 times plain tasks": (f"{deep['of plain']:.2f}", deep["of plain"] <= 1.3),
        "waiting: at most 2 KB a flow": (
            f"{figures['waiting']['bytes a flow']:,.0f}",
            figures["waiting"]["bytes a flow"] <= 2_048,
        ),
        "waiting: woken within 20 ms": (
            f"{figures['waiting']['woken ms']:.1f}",
            figures["waiting"]["woken ms"] <= 20,
        ),
    }
    rounded = {
        name: {column: round(value, 2) for column, value in row.items()} for name, row in figures.items()
    }
    return report("flows", rounded, claims)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=3_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--nested", type=int, default=1_000)
    parser.add_argument("--waiting", type=int, default=20_000)
    sys.exit(asyncio.run(run(parser.parse_args())))
