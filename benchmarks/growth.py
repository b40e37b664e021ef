"""The cost of a task while rows wait, with rows of ended tasks, and over a time of steady load.

    python -m benchmarks.growth [--waiting 1000 100000 1000000] [--ended 1000000]
        [--history 1000000] [--tasks 20000] [--rate 80] [--seconds 20] [--rounds 1]
    python -m benchmarks.growth --waiting 10000000 --ended 1000000 --history 100000000
    python -m benchmarks.growth --steady 3600

The first form compares cases. The smallest has 1,000 waiting tasks and no ended ones. The others
have the tasks that `--waiting` names. The last ones have the most of them and also ended tasks:
`--ended` in the table of tasks, with their attempts, and `--history` in history. SQL inserts these
rows. Each case has its own broker, database and services, one worker process, and three
measurements of tasks with three no-op stages:

- paced: tasks are submitted one by one over HTTP at a rate. The waiting ones are of another type,
  which is paused.
- full: tasks are submitted at once to the topic `submitted`, beside the same rows.
- drained: the tasks at the head of the waiting ones, after the pause of their type ended.

`--steady` submits for a time instead and reports each minute. Of a time below ten minutes it
reports each tenth.

The CPU is that of all processes but the benchmark. With `--pieces FILE` each measurement is added
to a file and the report covers all in it, so that a run can be done in pieces. `--only 0 2` runs
the first and the third case, and `--rounds 0` reports without a further measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.loops import Whole, everything, whole
from benchmarks.measurements import CpuMeter, percentile, report
from benchmarks.part_load import WARM_UP_S, at_rate
from benchmarks.throughput import PADDING, submit
from penstock.client import Client
from penstock.local.deployment import Deployment
from penstock.postgres import types
from penstock.postgres.connection import open_pool

SQL = Path(__file__).with_name("growth.sql")
# The measured type, and that of the waiting tasks.
MEASURED, WAITING = "noop", "waiting"
SMALLEST = 1000
# Maximum growth of CPU time per task.
MOST_GROWTH = 1.10
CPU = ("paced, CPU ms/task", "full, CPU ms/task", "drained, CPU ms/task")
# Priorities of the tasks that are drained, and of those behind them.
AHEAD, BEHIND = (0, 0), (3, 4)
# Hours of ended tasks in the table of tasks; fewer than `PENSTOCK_HISTORY_KEEP_DAYS` has.
ENDED_H = 6 * 24
# The days of history, as days ago: after the tasks have left their table, before they are archived.
FIRST_DAY, DAYS = 10, 30
# Most rows of one statement.
CHUNK = 1_000_000
POLL_S = 0.25

Figures = dict[str, float]


@dataclass(frozen=True)
class Case:
    """The rows at the start.

    Attributes:
        waiting: number of waiting tasks.
        ended: number of ended tasks in the table of tasks.
        history: number of tasks in history.
    """

    waiting: int = SMALLEST
    ended: int = 0
    history: int = 0

    @property
    def name(self) -> str:
        """Name in the table."""
        more = [f"{self.ended:,} ended"] * bool(self.ended) + [f"{self.history:,} in history"] * bool(
            self.history
        )
        return ", ".join([f"{self.waiting:,} waiting", *more])


class Cost:
    """The CPU time of tasks from now on: of all processes, and of PostgreSQL."""

    def __init__(self, loop: Whole) -> None:
        self._all = CpuMeter(loop.pids)
        self._postgres = CpuMeter([loop.deployment.processes["postgres"]])

    def of(self, tasks: int) -> Figures:
        """Milliseconds a task."""
        return {
            "CPU ms/task": self._all.seconds() * 1000 / tasks,
            "PostgreSQL ms/task": self._postgres.seconds() * 1000 / tasks,
        }


def queries() -> dict[str, str]:
    """Returns the statements of growth.sql by name."""
    parts = SQL.read_text().split("-- name: ")[1:]
    return {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in parts}


def shares(count: int, parts: int) -> list[int]:
    """Divides a number into equal parts, without those that are empty."""
    return [n for n in (count * (i + 1) // parts - count * i // parts for i in range(parts)) if n]


async def fill(connection: Any, case: Case) -> None:
    """Inserts the rows of a case, and leaves no work for autovacuum."""
    sql = queries()
    for count in shares(case.waiting, 1 + case.waiting // CHUNK):
        await connection.execute(sql["waiting"], WAITING, count, *BEHIND, timeout=None)
    for hours, count in enumerate(shares(case.ended, ENDED_H)):
        await connection.execute(sql["ended"], "ended", count, ENDED_H - hours, timeout=None)
    for days, count in enumerate(shares(case.history, DAYS)):
        await connection.fetch(sql["open_day"], FIRST_DAY + days)
        await connection.execute(sql["history"], "ended", count, FIRST_DAY + days, timeout=None)
    for table in ("task", "attempt", "history"):
        await connection.execute(f"VACUUM (ANALYZE) penstock.{table}", timeout=None)
    await connection.execute("CHECKPOINT", timeout=None)


@asynccontextmanager
async def started(case: Case) -> AsyncIterator[Whole]:
    """A deployment with the rows of a case, whose worker has run tasks for a while."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with (
            Deployment(everything(Path(folder))) as deployment,
            whole(deployment, types=(MEASURED, WAITING)) as both,
        ):
            await pause(deployment, paused=True)
            begin = time.perf_counter()
            await fill(both.connection, case)
            print(f"{case.name}: made in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
            loop = dataclasses.replace(both, types=(MEASURED,))
            since = await now(loop)
            await submit(loop, 1)
            # The worker has joined.
            await succeeded(loop, MEASURED, 1, since)
            yield loop


async def pause(deployment: Deployment, *, paused: bool) -> None:
    """Begins or ends the pause of the type of the waiting tasks."""
    async with open_pool(deployment.postgres, "benchmark", size=1) as pool:
        await types.change(pool, WAITING, lambda one: dataclasses.replace(one, paused=paused))


async def now(loop: Whole) -> datetime:
    """The database's clock."""
    moment: datetime = await loop.connection.fetchval("SELECT clock_timestamp()")
    return moment


async def succeeded(loop: Whole, type_: str, count: int, since: datetime) -> None:
    """Waits until `count` tasks of a type have succeeded since a moment."""
    sql = queries()["succeeded"]
    while await loop.connection.fetchval(sql, type_, since) < count:
        await asyncio.sleep(POLL_S)


async def paced(loop: Whole, client: Client, rate: float, seconds: float) -> Figures:
    """Submits one by one at a rate; returns the cost of a task and its latency."""

    async def one() -> None:
        await client.submit(MEASURED, {"at": time.time(), "pad": PADDING})

    since, cost = await now(loop), Cost(loop)
    count = await at_rate(rate, seconds, one)
    await succeeded(loop, MEASURED, count, since)
    used = cost.of(count)
    rows = await loop.connection.fetch(queries()["latencies"], MEASURED, since)
    took_ms = [row["ms"] for row in rows]
    return {**used, "p50 (ms)": percentile(took_ms, 0.5), "p99 (ms)": percentile(took_ms, 0.99)}


async def full(loop: Whole, tasks: int) -> Figures:
    """Submits all at once; returns the cost of a task and the rate."""
    since, cost, begin = await now(loop), Cost(loop), time.perf_counter()
    await submit(loop, tasks)
    await succeeded(loop, MEASURED, tasks, since)
    took = time.perf_counter() - begin
    return {**cost.of(tasks), "tasks/s": tasks / took}


async def drained(loop: Whole, tasks: int) -> Figures:
    """Inserts the tasks ahead of all that wait, and ends the pause of their type."""
    await loop.connection.execute(queries()["waiting"], WAITING, tasks, *AHEAD, timeout=None)
    await loop.connection.execute("VACUUM (ANALYZE) penstock.task", timeout=None)
    since, cost, begin = await now(loop), Cost(loop), time.perf_counter()
    await pause(loop.deployment, paused=False)
    await succeeded(loop, WAITING, tasks, since)
    took = time.perf_counter() - begin
    return {**cost.of(tasks), "tasks/s": tasks / took}


async def measure(case: Case, tasks: int, rate: float, seconds: float) -> Figures:
    """Measures a case once."""
    async with started(case) as loop, Client(loop.deployment.gateway_url) as client:
        await paced(loop, client, rate, WARM_UP_S)
        found = {"paced": await paced(loop, client, rate, seconds)}
        await full(loop, 1000)
        found["full"] = await full(loop, tasks)
        found["drained"] = await drained(loop, tasks)
    return {f"{how}, {name}": value for how, figures in found.items() for name, value in figures.items()}


async def measure_steady(case: Case, rate: float, seconds: float) -> dict[str, Figures]:
    """Submits at a steady rate; returns the figures of each part of the time."""
    part_s = min(60.0, seconds / 10)
    found: dict[str, Figures] = {}
    async with started(case) as loop, Client(loop.deployment.gateway_url) as client:
        await paced(loop, client, rate, WARM_UP_S)
        for number in range(round(seconds / part_s)):
            figures = await paced(loop, client, rate, part_s)
            figures["memory (MiB)"] = sum(psutil.Process(pid).memory_info().rss for pid in loop.pids) / 2**20
            found[f"{STEADY} {(number + 1) * part_s:,.0f} s"] = figures
    return found


STEADY = f"steady load with {Case().name}, until"


def cases(waiting: Sequence[int], ended: int, history: int) -> list[Case]:
    """The smallest case, those with more waiting tasks, and those with ended tasks as well."""
    most = max(waiting)
    found = [Case(), *map(Case, waiting)]
    if ended:
        found.append(Case(most, ended))
    if history:
        found.append(Case(most, ended, history))
    return list(dict.fromkeys(found))


def claims(figures: Mapping[str, Figures]) -> dict[str, tuple[str, bool]]:
    """Compares the cost of each case with that of the smallest, and the ends of the steady load."""
    smallest = figures.get(Case().name)
    found: dict[str, tuple[str, bool]] = {}
    for name, row in figures.items():
        if smallest is not None and row is not smallest and CPU[0] in row:
            for column in CPU:
                ratio = row[column] / smallest[column]
                found[f"{name}: {column} at most 10 % above that with {Case().name}"] = (
                    f"{ratio:.2f}",
                    ratio <= MOST_GROWTH,
                )
    steady = [row["CPU ms/task"] for name, row in figures.items() if name.startswith(STEADY)]
    if steady:
        quarter = max(1, len(steady) // 4)
        ratio = median(steady[-quarter:]) / median(steady[:quarter])
        found["steady load: the last quarter costs at most 10 % more CPU a task than the first"] = (
            f"{ratio:.2f}",
            ratio <= MOST_GROWTH,
        )
    return found


def medians(measured: Sequence[tuple[str, Figures]]) -> dict[str, Figures]:
    """The median of each figure, by row; a piece of an earlier version may lack some."""
    by_row: dict[str, list[Figures]] = {}
    for name, figures in measured:
        by_row.setdefault(name, []).append(figures)
    return {
        name: {
            key: round(median(one[key] for one in some if key in one), None if key.endswith("tasks/s") else 3)
            for key in max(some, key=len)
        }
        for name, some in by_row.items()
    }


async def run(given: argparse.Namespace) -> AsyncIterator[tuple[str, Figures]]:
    """Measures in turn; returns each row when it is measured."""
    if given.steady:
        for name, figures in (await measure_steady(Case(), given.rate, given.steady)).items():
            yield name, figures
        return
    all_cases = cases(given.waiting, given.ended, given.history)
    for _ in range(given.rounds):
        for case in all_cases if given.only is None else [all_cases[number] for number in given.only]:
            figures = await measure(case, given.tasks, given.rate, given.seconds)
            print(f"{case.name}: {', '.join(f'{figures[key]:.3f}' for key in CPU)} ms", file=sys.stderr)
            yield case.name, figures


async def collect(given: argparse.Namespace) -> list[tuple[str, Figures]]:
    """All measurements, with those that the file of pieces has from earlier runs."""
    if given.pieces is None:
        return [row async for row in run(given)]
    async for row in run(given):
        with given.pieces.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return [(name, figures) for name, figures in map(json.loads, given.pieces.read_text().splitlines())]


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--ended", type=int, default=1_000_000)
    parser.add_argument("--history", type=int, default=1_000_000)
    parser.add_argument("--tasks", type=int, default=20_000, help="of a measurement at full load")
    parser.add_argument("--rate", type=float, default=80, help="tasks a second, paced")
    parser.add_argument("--seconds", type=float, default=20, help="of a paced measurement")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the cases to run, from 0")
    parser.add_argument("--steady", type=float, help="seconds of steady load, in place of the cases")
    parser.add_argument("--pieces", type=Path, help="file that keeps the measurements of several runs")
    given = parser.parse_args()
    figures = medians(asyncio.run(collect(given)))
    return report("growth", figures, claims(figures))


if __name__ == "__main__":
    sys.exit(main())
