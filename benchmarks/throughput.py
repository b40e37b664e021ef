"""Throughput: N tasks of three no-op stages through Penstock, compared with the bare loop.

    python -m benchmarks.throughput [--tasks 30000] [--rounds 3]

Both run in turn on the same kind of embedded broker and database, `rounds` times. Each value is the
median of its rounds. CPU time includes every process of the loop, with broker and database.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.loops import Loop, bare, everything, finish, servers_only, whole
from benchmarks.measurements import CpuMeter, report
from penstock.local.deployment import Deployment

SUBMIT_BATCH = 1000
PADDING = "x" * 160  # makes the context 200 bytes


async def measure(loop: Loop, tasks: int) -> dict[str, float]:
    """Runs tasks to their end; returns tasks per second and CPU milliseconds per task."""
    # Warm-up: metadata is fetched, statements are prepared, groups are joined.
    await submit(loop, 500)
    await finish(loop, 500)
    meter = CpuMeter(loop.pids)
    begin = time.perf_counter()
    await submit(loop, tasks)
    await finish(loop, 500 + tasks)
    took = time.perf_counter() - begin
    return {"tasks_per_s": tasks / took, "cpu_ms_per_task": meter.seconds() * 1000 / tasks}


async def submit(loop: Loop, count: int) -> None:
    """Submits `count` tasks in batches."""
    for begin in range(0, count, SUBMIT_BATCH):
        await loop.submit([{"at": time.time(), "pad": PADDING}] * min(SUBMIT_BATCH, count - begin))


async def run(tasks: int, rounds: int) -> int:
    """Runs both loops in turn and reports."""
    found: dict[str, list[dict[str, float]]] = {"bare loop": [], "Penstock": []}
    for number in range(rounds):
        for name, options, start in (("bare loop", servers_only, bare), ("Penstock", everything, whole)):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                async with Deployment(options(Path(folder))) as deployment, start(deployment) as loop:
                    measured = await measure(loop, tasks)
            found[name].append(measured)
            print(f"round {number + 1}, {name}: {measured['tasks_per_s']:,.0f} tasks/s", file=sys.stderr)
    figures = {
        name: {
            "tasks/s": round(median(m["tasks_per_s"] for m in measured)),
            "stages/s": round(median(3 * m["tasks_per_s"] for m in measured)),
            "CPU ms/task": round(median(m["cpu_ms_per_task"] for m in measured), 3),
        }
        for name, measured in found.items()
    }
    ours, theirs = figures["Penstock"], figures["bare loop"]
    ratio = ours["tasks/s"] / theirs["tasks/s"]
    return report(
        "throughput",
        figures,
        {
            "at least 3,000 tasks/s": (f"{ours['tasks/s']:,}", ours["tasks/s"] >= 3000),
            "at most 0.6 ms CPU a task": (f"{ours['CPU ms/task']}", ours["CPU ms/task"] <= 0.6),
            "at least half the bare loop": (f"{ratio:.2f}", ratio >= 0.5),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.tasks, arguments.rounds)))
