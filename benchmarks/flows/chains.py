"""Chains of three one-stage nodes beside plain tasks, and the time from a node to the next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from statistics import median

import asyncpg

from benchmarks.flows.bench import Bench, Claims, Figures

_ALONE = 25


async def measure(bench: Bench, count: int) -> tuple[Figures, Claims]:
    """Measures so many chains at once, then a few alone."""
    found = await _throughput(bench, count)
    steps = await _steps(bench)
    ratio = found["chained tasks/s"] / found["plain tasks/s"]
    step = steps["node to node ms"] / steps["stage to stage ms"]
    claims = {
        "chains: at least 0.5 of plain tasks": (f"{ratio:.2f}", ratio >= 0.5),
        "node to node: at most 1.6 times stage to stage": (f"{step:.2f}", step <= 1.6),
    }
    return {"chains of three": found, "from node to node": steps}, claims


async def _throughput(bench: Bench, count: int) -> dict[str, float]:
    """Tasks per second of plain tasks and of chains of three."""
    await bench.tasks_done(await bench.submit(500))
    await bench.flows_done(await bench.start("chain", 50))
    begin = time.perf_counter()
    plain = (await bench.tasks_done(await bench.submit(3 * count))) - begin
    owner = bench.owner_meter()
    begin = time.perf_counter()
    chained = (await bench.flows_done(await bench.start("chain", count))) - begin
    cost = owner.cost()
    return {
        "plain tasks/s": 3 * count / plain,
        "chained tasks/s": 3 * count / chained,
        "owner CPU ms a node": cost.cpu_s * 1000 / (3 * count),
        "nodes a transaction": 3 * count / cost.transactions,
    }


async def _steps(bench: Bench) -> dict[str, float]:
    """Milliseconds from one stage to the next, and from one node to the next, when idle."""
    staged: list[float] = []
    chained: list[float] = []
    for _ in range(_ALONE):
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
