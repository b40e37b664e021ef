"""Types with a limit of starts per second, and what they cost a type without one.

    python -m benchmarks.rates [--seconds 60]

Every rated type has a backlog that lasts longer than the measurement. A type without a limit gets
tasks at a steady rate: first beside types without limits that get as many tasks as the rates would
allow, then beside the rated types. A limit counts each stage of a task. The rate of a type is
measured between its first and its last end of a task within the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.loops import Whole, everything, whole
from benchmarks.measurements import percentile, report
from penstock.local.deployment import Deployment
from penstock.postgres import types as registry
from penstock.postgres.connection import open_pool

RATES = (0.7, 1, 3, 13, 100)
FREE = "free"
FREE_PER_S = 20
STAGES = 3
WARM_UP_S = 10
# A rated type begins within this time: its topic is created, and its first start waits for a token.
BEGIN_S = 5

_ENDS = """
SELECT extract(epoch FROM finished_at)::float8 AS ended_s,
       (convert_from(result, 'UTF8')::jsonb ->> 'at')::float8 AS submitted_s
  FROM penstock.task WHERE type = $1 AND finished_at IS NOT NULL ORDER BY finished_at
"""


def _name(rate: float) -> str:
    return f"rate-{rate:g}".replace(".", "_")


async def _submit_steadily(loop: Whole, per_s: Mapping[str, float], seconds: float) -> None:
    begin_s = time.perf_counter()
    moments = sorted((n / rate, name) for name, rate in per_s.items() for n in range(int(rate * seconds)))
    for at_s, name in moments:
        await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
        await _submit(loop, name, 1)
    await asyncio.sleep(max(0.0, begin_s + seconds - time.perf_counter()))


async def _submit(loop: Whole, name: str, count: int) -> None:
    loop.types = (name,)
    await loop.submit([{"at": time.time()}] * count)


async def _latencies(loop: Whole, since_s: float, until_s: float) -> list[float]:
    rows = await loop.connection.fetch(_ENDS, FREE)
    return [row["ended_s"] - row["submitted_s"] for row in rows if since_s <= row["submitted_s"] < until_s]


async def run(seconds: float) -> int:
    """Measures and reports."""
    names = [_name(rate) for rate in RATES]
    figures: dict[str, dict[str, Any]] = {}
    claims = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with (
            Deployment(everything(Path(folder))) as deployment,
            whole(deployment, types=[FREE, *names]) as loop,
            open_pool(deployment.postgres, "benchmark", size=1) as pool,
        ):
            free = {FREE: FREE_PER_S}
            unlimited = free | {name: rate / STAGES for rate, name in zip(RATES, names, strict=True)}
            await _submit_steadily(loop, unlimited, WARM_UP_S)
            since_s = time.time()
            await _submit_steadily(loop, unlimited, seconds)
            without = await _latencies(loop, since_s, time.time())
            await asyncio.sleep(1)
            for rate, name in zip(RATES, names, strict=True):
                await registry.register(
                    pool, registry.TaskType(name=name, first_stage="one", starts_per_s=rate)
                )
                await _submit(loop, name, int(rate * (seconds + 2 * BEGIN_S) / STAGES) + 2)
            await _submit_steadily(loop, free, BEGIN_S)
            since_s = time.time()
            await _submit_steadily(loop, free, seconds)
            until_s = time.time()
            beside = await _latencies(loop, since_s, until_s)
            await asyncio.sleep(1)
            for rate, name in zip(RATES, names, strict=True):
                ends = [row["ended_s"] for row in await loop.connection.fetch(_ENDS, name)]
                ends = [end for end in ends if since_s <= end < until_s]
                gap_s = max(later - earlier for earlier, later in itertools.pairwise(ends))
                measured = STAGES * (len(ends) - 1) / (ends[-1] - ends[0])
                figures[f"{rate:g}/s"] = {
                    "measured (1/s)": round(measured, 3),
                    "longest pause of ends (s)": round(gap_s, 2),
                }
                claims[f"{rate:g} starts a second, within 5 %"] = (
                    f"{measured / rate:.1%}",
                    abs(measured / rate - 1) <= 0.05,
                )
    for name, latencies in (("beside types without limits", without), ("beside rated types", beside)):
        figures[name] = {
            f"whole p{share} (ms)": round(percentile(latencies, share / 100) * 1000, 1) for share in (50, 99)
        }
    p99 = [figures[name]["whole p99 (ms)"] for name in ("beside types without limits", "beside rated types")]
    claims["p99 of the type without a limit: at most 1.5 times that beside the same load without limits"] = (
        f"{p99[1] / p99[0]:.2f}",
        p99[1] <= 1.5 * p99[0],
    )
    return report("rates", figures, claims)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    sys.exit(asyncio.run(run(parser.parse_args().seconds)))
