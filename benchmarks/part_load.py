"""The cost of a task at part load: CPU by process, latency and bytes in topics, at a steady rate.

    python -m benchmarks.part_load [--rate 80] [--seconds 20] [--rounds 2] [--idle 20]
        [--batch 1] [--before PATH]

Tasks of three no-op stages are submitted over HTTP, one by one or `--batch` at a time. There are
two worker processes and one of each service. The bare loop of the same run is the baseline: its
rows are inserted directly, one by one. At the end nothing is submitted, and the CPU of the idle
deployment is measured for a while.
With `--before`, workers of another source tree run on the same deployment in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median

import asyncpg

from benchmarks.loops import bare, everything, servers_only
from benchmarks.measurements import CpuMeter, percentile, report
from penstock.client import Client
from penstock.local.deployment import Deployment

WORKERS = 2
# Longer than workers claim every record first after their partitions were assigned.
WARM_UP_S = 15.0
# Longer than clients take to lengthen their waits.
REST_S = 35.0
RATIO = "all, ratio to the bare loop"
TYPE = "noop"
LATENCIES = (
    "SELECT extract(epoch FROM finished_at)::float8"
    " - (convert_from(result, 'UTF8')::jsonb ->> 'at')::float8 FROM penstock.task"
    " WHERE id > $1 AND state = 'succeeded'"
)

Figures = dict[str, float]


def topic_bytes(folder: Path) -> int:
    """Bytes of all records of a deployment's broker, consumer offsets included."""
    logs = (folder / "kafka").rglob("[0-9]*.log")
    return sum(log.stat().st_size for log in logs if not log.parent.name.startswith("__cluster"))


async def at_rate(rate: float, seconds: float, submit: Callable[[], Awaitable[object]]) -> int:
    """Calls `submit` at a steady rate; returns how often."""
    count, begin = int(rate * seconds), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            group.create_task(_call(submit))
    return count


async def _call(submit: Callable[[], Awaitable[object]]) -> None:
    await submit()


async def measure(
    pids: Mapping[str, list[int]],
    rate: float,
    seconds: float,
    submit: Callable[[], Awaitable[object]],
    batch: int = 1,
) -> Figures:
    """CPU milliseconds a task, by process and in all; each `submit` has `batch` tasks."""
    meters = {name: CpuMeter(of_name) for name, of_name in pids.items()}
    count = await at_rate(rate, seconds, submit) * batch
    used = {name: meter.seconds() * 1000 / count for name, meter in meters.items()}
    return {**used, "all": sum(used.values())}


async def measure_bare(rate: float, seconds: float) -> Figures:
    """The bare loop, all processes together."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with Deployment(servers_only(Path(folder))) as deployment, bare(deployment) as loop:
            lock = asyncio.Lock()

            async def submit() -> None:
                async with lock:  # one connection
                    await loop.submit([{"at": time.time(), "pad": "x" * 160}])

            await at_rate(rate, WARM_UP_S, submit)
            return await measure({"all": list(loop.pids)}, rate, seconds, submit)


async def measure_idle(pids: Mapping[str, list[int]], seconds: float) -> Figures:
    """Percent of a core that is used while nothing is submitted, by process and in all."""
    await asyncio.sleep(REST_S)
    meters = {name: CpuMeter(of_name) for name, of_name in pids.items()}
    await asyncio.sleep(seconds)
    used = {name: meter.seconds() * 100 / seconds for name, meter in meters.items()}
    return {**used, "all": sum(used.values())}


async def measure_workers(
    deployment: Deployment,
    folder: Path,
    tree: Path,
    rate: float,
    seconds: float,
    idle_s: float = 0.0,
    batch: int = 1,
) -> tuple[Figures, Figures]:
    """Penstock with the workers of a source tree: under load, and idle for `idle_s`."""
    environment = {**os.environ, **deployment.environment, "PYTHONPATH": f"{tree / 'services'}:{tree}"}
    command = [sys.executable, "-m", "benchmarks.noop_worker", TYPE]
    workers = [subprocess.Popen(command, env=environment, cwd=tree) for _ in range(WORKERS)]
    connection = await asyncpg.connect(deployment.postgres)
    try:
        async with Client(deployment.gateway_url) as client:

            async def submit() -> None:
                context = {"at": time.time(), "pad": "x" * 160}
                if batch == 1:
                    await client.submit(TYPE, context)
                else:
                    await client.submit_many([{"type": TYPE, "context": context}] * batch)

            # The warm-up begins once the workers have joined.
            first = await client.submit(TYPE, {"at": time.time()})
            await client.wait([first.id])
            await at_rate(rate / batch, WARM_UP_S, submit)
            last = await connection.fetchval("SELECT max(id) FROM penstock.task")
            pids = {name: [pid] for name, pid in deployment.processes.items()}
            pids["workers"] = [worker.pid for worker in workers]
            bytes_before = topic_bytes(folder)
            figures = await measure(pids, rate / batch, seconds, submit, batch)
            while await connection.fetchval("SELECT count(*) FROM penstock.task WHERE state <> 'succeeded'"):
                await asyncio.sleep(0.1)
            whole = [row[0] * 1000 for row in await connection.fetch(LATENCIES, last)]
            topics_kib = (topic_bytes(folder) - bytes_before) / 1024 / len(whole)
            idle = await measure_idle(pids, idle_s) if idle_s else {}
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        await connection.close()
    latencies = {"p50 (ms)": percentile(whole, 0.5), "p99 (ms)": percentile(whole, 0.99)}
    return {**figures, **latencies, "topics KiB": topics_kib}, idle


async def figures(
    rate: float,
    seconds: float,
    rounds: int = 1,
    idle_s: float = 0.0,
    before: Path | None = None,
    batch: int = 1,
) -> dict[str, Figures]:
    """Measures in turn; returns the median of each figure, by subject."""
    here = Path(__file__).parent.parent
    trees = {"before": before, "Penstock": here} if before else {"Penstock": here}
    baseline = await measure_bare(rate, seconds)
    found: dict[str, list[Figures]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with Deployment(everything(Path(folder))) as deployment:
            async with Client(deployment.gateway_url) as client:
                await client.register_type(TYPE, first_stage="one")
            for number in range(rounds):
                for name, tree in trees.items():
                    last = number == rounds - 1 and tree == here
                    load, idle = await measure_workers(
                        deployment, Path(folder), tree, rate, seconds, idle_s if last else 0.0, batch
                    )
                    found[name].append(load)
    rows = {
        name: {key: round(median(one[key] for one in each), 2) for key in each[0]}
        for name, each in found.items()
    }
    for row in rows.values():
        row[RATIO] = round(row["all"] / baseline["all"], 2)
    rows["bare loop"] = {"all": round(baseline["all"], 2)}
    if idle:
        rows["idle (% of a core)"] = {name: round(used, 2) for name, used in idle.items()}
    return rows


def main() -> int:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=80)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--idle", type=float, default=20, help="seconds without tasks at the end; 0 is none")
    parser.add_argument("--batch", type=int, default=1, help="tasks of one submission")
    parser.add_argument("--before", type=Path, help="root of a source tree whose workers are compared")
    given = parser.parse_args()
    found = asyncio.run(
        figures(given.rate, given.seconds, given.rounds, given.idle, given.before, given.batch)
    )
    return report("part_load" if given.batch == 1 else "part_load_batches", found, {})


if __name__ == "__main__":
    sys.exit(main())
