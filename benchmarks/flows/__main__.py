"""Flows beside plain tasks, and beside DBOS and Celery's canvas, in one run.

    make bench-flows                                    # also installs the other systems
    python -m benchmarks.flows [--scale 0.05] [--only chains nested]

Each case runs beside plain tasks of the same number, in a deployment of all services on this
machine, so its figures are ratios. The times between nodes are those of the attempts: from the end
of a handler to the start of the next. Cases by name: chains, join, fan-out, spawned, schedules,
backfill, nested, waiting, peers.

It writes benchmarks/results/flows.json and the table in docs/explanation/comparison.md; with
--only it writes neither.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable

from benchmarks.flows import chains, fan_out, nested, schedules, waiting
from benchmarks.flows.bench import Bench, Claims, Figures, running_bench
from benchmarks.measurements import save, show
from benchmarks.peers import tables

Measure = Callable[[Bench, int], Awaitable[tuple[Figures, Claims]]]

# The cases in their order, with the counts of a full run.
_AT_ONCE: dict[str, tuple[Measure, int]] = {
    "chains": (chains.measure, 5_000),
    "join": (fan_out.measure_join, 1),
    "fan-out": (fan_out.measure_fan_out, 100_000),
    "spawned": (fan_out.measure_spawn, 100_000),
    "schedules": (schedules.measure_schedules, 10_000),
    "backfill": (schedules.measure_backfill, 10_000),
}
_NESTED = 1_000
_WAITING = 1_000_000
_PEERS = (100, 12, 2)


async def _run(only: list[str], scale: float) -> int:
    figures: Figures = {}
    claims: Claims = {}

    async def case(name: str, measure: Measure, bench: Bench, count: int) -> None:
        if name in only:
            found, claimed = await measure(bench, max(1, round(count * scale)))
            figures.update(found)
            claims.update(claimed)
            print(name, found, file=sys.stderr)

    # Without a worker, and before a task has run: an idle deployment.
    async with running_bench() as bench:
        await case("waiting", waiting.measure, bench, _WAITING)
    async with running_bench() as bench:
        with bench.worker():
            for name, (measure, count) in _AT_ONCE.items():
                await case(name, measure, bench, count)
        with bench.worker(pool=1):
            await case("nested", nested.measure, bench, _NESTED)
    rows = {name: {column: round(value, 3) for column, value in row.items()} for name, row in figures.items()}
    if "peers" in only:
        # The other systems are installed for this case alone.
        from benchmarks.flows import peers  # noqa: PLC0415

        rows |= await peers.measure(*(max(2, round(count * min(1.0, 4 * scale))) for count in _PEERS))
    show("flows", rows, claims)
    if only == CASES:
        save("flows", rows, claims)
        tables.write(tables.COMPARISON, "flows", tables.flows(rows))
    return 0 if all(holds for _found, holds in claims.values()) else 1


CASES = [*_AT_ONCE, "nested", "waiting", "peers"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="part of each count, such as 0.05")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(_run(arguments.only, arguments.scale)))
