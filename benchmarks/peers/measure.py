"""One peer, measured: paced at several rates, then at full speed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measurements import CpuMeter, percentile
from benchmarks.peers.running import CLIENT, WORKER, Running

# Longer than Penstock's workers claim every record first after their partitions were assigned.
WARM_UP_S = 12.0
WARM_UP_RATE = 80
# Before each rate, not counted.
SETTLE_S = 2.0
UNFINISHED = 2_000
# Seconds in which what was submitted must end. A rate is sustained when 99 % end within two seconds
# of the last submission: one late task is a matter of latency.
DRAIN_S, SUSTAINED_S, SUSTAINED = 120.0, 2.0, 0.99
SERVERS = ("redis", "kafka", "postgres")

Figures = dict[str, Any]


class Meters:
    """CPU of all processes, by part: servers by name, services, worker, client."""

    def __init__(self, one: Running) -> None:
        self._meters = {name: CpuMeter(pids) for name, pids in one.pids.items()}

    def ms_per(self, count: int) -> dict[str, float]:
        """CPU milliseconds a task, by part and in all."""
        used: dict[str, float] = {}
        for name, meter in self._meters.items():
            part = name if name in (*SERVERS, WORKER, CLIENT) else "services"
            used[part] = used.get(part, 0.0) + meter.seconds() * 1000 / max(1, count)
        return {"all": round(sum(used.values()), 3)} | {part: round(ms, 3) for part, ms in used.items()}


class Numbers:
    """Gives ranges of task numbers."""

    def __init__(self) -> None:
        self._next = 1

    def take(self, count: int) -> int:
        """Returns the first of `count` numbers."""
        first, self._next = self._next, self._next + count
        return first


async def measure(one: Running, rates: Sequence[float], seconds: float) -> Figures:
    """Measures a peer that runs.

    Returns:
        For each rate, and for `full`: CPU by part in ms a task, latencies in ms, and at full speed
        tasks a second. None where a rate was not sustained, or tasks did not end. `memory MiB` by
        program after the last rate.
    """
    numbers, figures = Numbers(), {}
    await _pace(one, numbers, WARM_UP_RATE, WARM_UP_S)
    sustained = True
    for rate in sorted(rates):
        # Above a rate that was not sustained there would only be a longer backlog.
        if sustained:
            await _pace(one, numbers, rate, SETTLE_S)
        figures[f"{rate:g}"] = await _paced(one, numbers, rate, seconds) if sustained else None
        sustained = figures[f"{rate:g}"] is not None
        _say(one, f"{rate:g}/s", figures[f"{rate:g}"])
    memory = one.memory_mib()
    figures["full"] = await _full(one, numbers, seconds)
    _say(one, "full", figures["full"])
    return figures | {"memory MiB": {name: round(mib) for name, mib in memory.items()}}


async def _pace(one: Running, numbers: Numbers, rate: float, seconds: float) -> list[int]:
    first = numbers.take(round(rate * seconds))
    answer = await one.command(do="pace", first=first, rate=rate, seconds=seconds)
    await one.wait_ended(answer["acknowledged"], DRAIN_S)
    return answer["acknowledged"]


async def _paced(one: Running, numbers: Numbers, rate: float, seconds: float) -> Figures | None:
    meters, due = Meters(one), time.time() + seconds + SUSTAINED_S
    first = numbers.take(round(rate * seconds))
    answer = await one.command(do="pace", first=first, rate=rate, seconds=seconds)
    submitted = answer["acknowledged"]
    if answer["refused"] or await one.wait_ended(submitted, DRAIN_S) is None:
        return None
    late = sum(one.ledger.submitted[number] + one.ledger.ends[number] > due for number in submitted)
    if late > (1 - SUSTAINED) * len(submitted):
        return None
    figures: Figures = {"CPU ms": meters.ms_per(len(submitted))}
    starts, ends = await _latencies(one, submitted)
    return figures | _percentiles("first stage ms", starts) | _percentiles("end ms", ends)


async def _full(one: Running, numbers: Numbers, seconds: float) -> Figures | None:
    meters, begin = Meters(one), time.monotonic()
    first = numbers.take(1_000_000)
    answer = await one.command(do="burst", first=first, seconds=seconds, unfinished=UNFINISHED)
    submitted = answer["acknowledged"]
    done = await one.wait_ended(submitted, DRAIN_S)
    if done is None:
        return None
    return {"tasks/s": round(len(submitted) / (done - begin), 1), "CPU ms": meters.ms_per(len(submitted))}


async def _latencies(one: Running, numbers: Sequence[int]) -> tuple[list[float], list[float]]:
    """Seconds to the first stage and to the end; the end by the peer's records if it keeps them."""
    starts = [one.ledger.starts[number] for number in numbers]
    if not one.peer.ended:
        return starts, [one.ledger.ends[number] for number in numbers]
    ended = await one.ends()
    while not all(number in ended for number in numbers):
        await asyncio.sleep(0.05)
        ended = await one.ends()
    return starts, [ended[number] - one.ledger.submitted[number] for number in numbers]


def _percentiles(name: str, seconds: list[float]) -> Figures:
    ms = [each * 1000 for each in seconds]
    return {f"{name} p50": round(percentile(ms, 0.5), 1), f"{name} p99": round(percentile(ms, 0.99), 1)}


def _say(one: Running, what: str, figures: Figures | None) -> None:
    print(f"{one.peer.name}, {what}: {figures or 'not sustained'}", file=sys.stderr)
