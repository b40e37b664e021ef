"""A large fan-out beside plain tasks, a join, and a stage that spawns many children."""

from __future__ import annotations

import time
from statistics import median

from benchmarks.flows.bench import Bench, Claims, Figures
from penstock.core.task import Priority

JOIN = 1_000
_JOINS = 7
# The last item of a join ends so long after all others.
_LAST_S = 0.5


async def measure_fan_out(bench: Bench, items: int) -> tuple[Figures, Claims]:
    """Measures a map of so many items, and an urgent task in its middle."""
    begin = time.perf_counter()
    plain = (await bench.tasks_done(await bench.submit(items))) - begin
    before = bench.owner_mib()
    owner = bench.owner_meter()
    begin = time.perf_counter()
    [flow_id] = await bench.start("fan", inputs={"items": list(range(items))})
    first = await bench.until(
        "SELECT true FROM penstock.task WHERE flow_id = $1 AND state = 'succeeded' LIMIT 1", flow_id
    )
    urgent_begin = time.perf_counter()
    urgent = await bench.tasks_done(await bench.submit(1, priority=Priority.HIGHEST)) - urgent_begin
    total = (await bench.flows_done([flow_id])) - begin
    cost = owner.cost()
    memory = bench.owner_mib() - before
    figures = {
        "items/s": items / total,
        "plain tasks/s": items / plain,
        "of plain": total / plain,
        "first item s": first - begin,
        "urgent task s": urgent,
        "memory MiB": memory,
        "owner transactions": cost.transactions,
        "over 100 ms": cost.slow,
    }
    claims = {
        "fan-out: first item within 0.5 s": (f"{first - begin:.2f}", first - begin <= 0.5),
        "fan-out: at most 1.3 times plain tasks": (f"{total / plain:.2f}", total / plain <= 1.3),
        "fan-out: no transaction of the owner over 100 ms": (
            f"{cost.slow} of {cost.transactions}",
            cost.slow == 0,
        ),
        "fan-out: an urgent task within 0.5 s": (f"{urgent:.2f}", urgent <= 0.5),
        "fan-out: the owner grows by at most 64 MiB": (f"{memory:.0f}", memory <= 64),
    }
    return {"fan-out": figures}, claims


async def measure_join(bench: Bench, _count: int) -> tuple[Figures, Claims]:
    """Milliseconds from the last end of 1,000 items to the start of the node behind them.

    Once the last item ends alone, and once all end at the same moment. Then the last result waits
    for the commit of those before it, as that of a plain task does: `burst commit ms` of the total.
    """
    figures: dict[str, float] = {}
    for name, last in (("join", _LAST_S), ("burst", 0)):
        waited, committed = [], []
        for _ in range(_JOINS):
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
    claims = {"join of 1,000: at most 25 ms": (f"{figures['join ms']:.1f}", figures["join ms"] <= 25)}
    return {"join of 1,000": figures}, claims


async def measure_spawn(bench: Bench, children: int) -> tuple[Figures, Claims]:
    """A stage that spawns children, and is woken once when they have ended."""
    begin = time.perf_counter()
    [task_id] = await bench.submit(1, "spawn", first=children)
    total = await bench.tasks_done([task_id]) - begin
    row = await bench.pool.fetchrow(
        """SELECT (SELECT count(*) FROM penstock.attempt WHERE task_id = $1 AND step > 0) AS woken,
                  (SELECT count(*) FROM penstock.task WHERE flow_root_id = $1 AND state = 'succeeded') AS ended""",
        task_id,
    )
    assert row is not None
    figures = {"children/s": children / total, "woken": row["woken"], "children": row["ended"]}
    once = row["woken"] == 1 and row["ended"] == children
    found = f"{row['woken']} after {row['ended']:,}"
    return {"spawned": figures}, {f"spawned: woken once after {children:,} children": (found, once)}
