"""Latency at low load (30 tasks per second of three no-op stages), and of the bare loop.

    python -m benchmarks.latency [--rate 30] [--seconds 30]

Both latencies start just before the submission is sent: one ends in the first stage's handler, the
other at the commit of the last stage. Penstock's submissions go through the topic and task-sync's
ingest; the bare loop inserts rows itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.loops import Loop, bare, everything, finish, servers_only, whole
from benchmarks.measurements import percentile, report
from penstock.local.deployment import Deployment

WARM_UP = 300


async def measure(loop: Loop, rate: float, seconds: float) -> dict[str, float]:
    """Submits one task at a time at a steady rate; returns milliseconds."""
    count = int(rate * seconds)
    begin = time.perf_counter()
    for number in range(WARM_UP + count):
        await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
        await loop.submit([{"at": time.time(), "pad": "x" * 160}])
    await finish(loop, WARM_UP + count)
    # Without the first ten seconds, in which clients fetch metadata and the JVM compiles.
    starts, ends = loop.starts[WARM_UP:], (await loop.whole())[WARM_UP:]
    return {
        "first stage p50": round(percentile(starts, 0.5) * 1000, 1),
        "first stage p99": round(percentile(starts, 0.99) * 1000, 1),
        "whole p50": round(percentile(ends, 0.5) * 1000, 1),
        "whole p99": round(percentile(ends, 0.99) * 1000, 1),
    }


async def run(rate: float, seconds: float) -> int:
    """Runs both loops in turn and reports."""
    figures = {}
    for name, options, start in (("bare loop", servers_only, bare), ("Penstock", everything, whole)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            async with Deployment(options(Path(folder))) as deployment, start(deployment) as loop:
                figures[name] = await measure(loop, rate, seconds)
    ratio = figures["Penstock"]["whole p50"] / figures["bare loop"]["whole p50"]
    return report(
        "latency",
        {name: {f"{key} (ms)": value for key, value in row.items()} for name, row in figures.items()},
        {
            "three stages, median: at most 1.5 times the bare loop": (f"{ratio:.2f}", ratio <= 1.5),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=30)
    parser.add_argument("--seconds", type=float, default=30)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.rate, arguments.seconds)))
