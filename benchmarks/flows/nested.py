"""Flows nested 50 deep with one worker slot, beside as many plain tasks."""

from __future__ import annotations

import time

from benchmarks.flows.bench import DEPTH, Bench, Claims, Figures


async def measure(bench: Bench, count: int) -> tuple[Figures, Claims]:
    """Measures so many families."""
    nodes = count * DEPTH
    await bench.flows_done(await bench.start("level0", 2))
    begin = time.perf_counter()
    plain = (await bench.tasks_done(await bench.submit(nodes))) - begin
    owner = bench.owner_meter()
    begin = time.perf_counter()
    deep = (await bench.flows_done(await bench.start("level0", count))) - begin
    cost = owner.cost()
    figures = {
        "nested tasks/s": nodes / deep,
        "plain tasks/s": nodes / plain,
        "of plain": deep / plain,
        "owner CPU ms a node": cost.cpu_s * 1000 / nodes,
        "nodes a transaction": nodes / cost.transactions,
    }
    claims = {"nested: at most 1.3 times plain tasks": (f"{deep / plain:.2f}", deep / plain <= 1.3)}
    return {"nested 50 deep, one slot": figures}, claims
