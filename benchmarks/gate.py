"""Release rate of task-sync, with small and very large backlogs.

    python -m benchmarks.gate [--seconds 8] [--rounds 3] [--waiting 0 100000 1000000]

Each case has its own broker, database and task-sync. A number of tasks of the same type and lower
priority waits already (in the last case tasks of 200 types). Then 100,000 more become ready, and
one worker claims them as fast as they are released. The rate counts the records in the given
seconds after the first. Rounds alternate, and medians are compared. The default window limits a
worker that finishes no task to about 8,000 per second, so compare the CPU too.

The report also has task-sync's memory at the end, and the CPU seconds of task-sync and PostgreSQL
per 1,000 tasks. The last column has the rows that the release statement read for one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import orjson
import psutil

from benchmarks.claimers import claim, queries
from benchmarks.measurements import CpuMeter, report
from penstock.local.deployment import SERVICES, Deployment, Options
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.postgres.queries import bound

RELEASED = 100_000
TYPES = 200
BATCH = 1000
MEASURED = types.TaskType(name="measured", first_stage="one", paused=True)


@dataclass(frozen=True)
class Case:
    """The backlog at the start.

    Attributes:
        waiting: number of waiting tasks.
        types: number of their types, including the measured one.
    """

    waiting: int
    types: int = 1

    @property
    def name(self) -> str:
        """Name in the table."""
        of = f", of {self.types} types" if self.types > 1 else ""
        return f"{self.waiting:,} waiting{of}"


@dataclass(frozen=True)
class Result:
    """The result of one round."""

    per_s: float
    memory_mib: float
    cpu_s: float
    plan: str


async def measure(case: Case, seconds: float) -> Result:
    """Runs one round."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = Options(
            data_dir=Path(folder),
            services={"task-sync": SERVICES["task-sync"]},
            kafka_port=0,
            postgres_port=0,
        )
        async with (
            Deployment(options) as deployment,
            open_pool(deployment.postgres, "benchmark", size=2) as pool,
        ):
            connection = await asyncpg.connect(
                deployment.postgres, server_settings={"search_path": "penstock"}, command_timeout=600
            )
            await fill(case, pool, connection)
            await full(case, connection)
            pids = [deployment.processes["task-sync"], deployment.processes["postgres"]]
            meters: list[CpuMeter] = []

            async def begin() -> None:
                meters.append(CpuMeter(pids))
                await types.change(pool, MEASURED.name, lambda one: dataclasses.replace(one, paused=False))

            # 3 s more, because the first polls wait for the first release.
            results = await claim(
                deployment, "kafka", MEASURED.name, workers=1, most=1000, seconds=seconds + 3, begin=begin
            )
            claimed = sum(len(ids) for _asked_s, _took_s, ids in results)
            cpu_s = meters[0].seconds() * 1000 / claimed
            memory = psutil.Process(pids[0]).memory_info().rss / 2**20
            plan = await plan_of(connection)
            await connection.close()
    first_s = min(asked_s + took_s for asked_s, took_s, ids in results if ids)
    got = sum(len(ids) for asked_s, took_s, ids in results if asked_s + took_s <= first_s + seconds)
    return Result(got / seconds, memory, cpu_s, plan)


async def fill(case: Case, pool: Any, connection: Any) -> None:
    """Registers the types and inserts the waiting tasks."""
    others = [
        types.TaskType(name=f"other{number}", partitions=1, paused=False) for number in range(case.types - 1)
    ]
    for one in (MEASURED, *others):
        await types.register(pool, one)
    each = case.waiting // case.types
    sql = queries()
    for one in (MEASURED, *others):
        if each:
            await connection.fetch(sql["fill"], one.name, each, 3)
    await connection.fetch(sql["fill"], MEASURED.name, RELEASED, 0)
    await connection.execute("VACUUM ANALYZE task")


async def full(case: Case, connection: Any) -> None:
    """Waits until the windows of all other types are full; they have no workers."""
    while (
        await connection.fetchval("SELECT count(DISTINCT type) FROM task WHERE state = 'queued'")
        < case.types - 1
    ):
        await asyncio.sleep(0.2)


async def plan_of(connection: Any) -> str:
    """Returns the indexes that the release statement scans, with the rows read."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        text, *values = bound(
            "release.release",
            type=MEASURED.name,
            limit=BATCH,
            confirmed=[],
            tracked=False,
            excluded=[],
            version=None,
        )
        rows = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}", *values)
    finally:
        await transaction.rollback()
    found = [
        f"{node['Node Type']} on {node['Index Name']}, {node['Actual Rows'] * node['Actual Loops']:,.0f} rows"
        for node in nodes(orjson.loads(rows)[0]["Plan"])
        if "Index Name" in node and node["Index Name"].startswith("task_re")
    ]
    return "; ".join(found)


def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Returns all nodes of a plan."""
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


async def run(seconds: float, rounds: int, waiting: Sequence[int]) -> int:
    """Runs all cases in turn and reports."""
    cases = [*map(Case, waiting), Case(max(waiting), TYPES)]
    found: dict[Case, list[Result]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            one = await measure(case, seconds)
            found[case].append(one)
            print(f"round {number + 1}, {case.name}: {one.per_s:,.0f}/s", file=sys.stderr)
    first = median(one.per_s for one in found[cases[0]])
    shares = {case: median(one.per_s for one in found[case]) / first for case in cases[1:]}
    return report(
        "gate",
        {
            case.name: {
                "released/s": round(median(one.per_s for one in some)),
                "task-sync (MiB)": round(max(one.memory_mib for one in some)),
                "CPU s per 1,000": round(median(one.cpu_s for one in some), 3),
                "found by": some[-1].plan,
            }
            for case, some in found.items()
        },
        {
            **{
                f"{case.name}: at least 80 % of the rate with {cases[0].name}": (f"{share:.2f}", share >= 0.8)
                for case, share in shares.items()
            },
            "memory of task-sync does not grow with the backlog": (
                ", ".join(f"{max(one.memory_mib for one in some):.0f}" for some in found.values()) + " MiB",
                max(one.memory_mib for some in found.values() for one in some)
                <= max(one.memory_mib for one in found[cases[0]]) + 64,
            ),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 100_000, 1_000_000])
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.seconds, arguments.rounds, arguments.waiting)))
