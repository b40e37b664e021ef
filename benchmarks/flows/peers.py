"""Flows beside DBOS and Celery's canvas: each system alone, in turn.

Three flows whose tasks do nothing: a chain of three, a join of 1,000 items, and ten nested levels
of a task each. The time is that from the submission of a flow, alone, to its end by the system's
own records (Celery keeps none: the end of its last task). Flows a second and CPU are those of many
flows at once; CPU is that of all processes, servers and client included. Each system is set up as
its module in `benchmarks/peers` says.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.flows.bench import Figures
from benchmarks.measurements import percentile
from benchmarks.peers.catalogue import FLOW_PEERS, Peer
from benchmarks.peers.measure import Meters, Numbers
from benchmarks.peers.running import Running, running

KINDS = {"chain": "chain of 3", "join": "join of 1,000", "nest": "nesting of 10"}
WITHIN_S = 120.0
WARM_UP_FLOWS = 100


async def _submit(one: Running, numbers: Numbers, kind: str, count: int) -> tuple[list[int], float]:
    """Submits flows at once and waits for their ends; returns their numbers and the seconds."""
    begin = time.monotonic()
    answer = await one.command(
        do="pace", first=numbers.take(count), rate=10_000, seconds=count / 10_000, fields={"flow": kind}
    )
    done = await one.wait_ended(answer["acknowledged"], WITHIN_S)
    assert done, f"{one.peer.name}: a {kind} has not ended"
    return answer["acknowledged"], done - begin


async def _ends(one: Running, submitted: list[int]) -> list[float]:
    """Seconds from submission to the end."""
    if not one.peer.ended:
        return [one.ledger.ends[number] for number in submitted]
    while not set(submitted) <= (ended := await one.ends()).keys():
        await asyncio.sleep(0.02)
    return [ended[number] - one.ledger.submitted[number] for number in submitted]


async def measure(flows: int, rounds: int, joins: int) -> Figures:
    """Measures all systems: flows at once, flows submitted alone (a quarter for joins), joins."""
    found: Figures = {}
    for peer in FLOW_PEERS:
        found |= await _measure(peer, rounds, {"chain": flows, "join": joins, "nest": flows})
    return found


async def _measure(peer: Peer, rounds: int, counts: dict[str, int]) -> Figures:
    found: Figures = {}
    numbers = Numbers()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with running(peer, Path(folder)) as one:
            for kind, title in KINDS.items():
                await _submit(one, numbers, kind, min(WARM_UP_FLOWS, max(1, counts[kind] // 2)))
                alone: list[float] = []
                for _ in range(max(3, rounds // 4) if kind == "join" else rounds):
                    submitted, _seconds = await _submit(one, numbers, kind, 1)
                    alone += await _ends(one, submitted)
                meters = Meters(one)
                _numbers, seconds = await _submit(one, numbers, kind, counts[kind])
                row = found[f"{peer.name}, {title}"] = {
                    "p50 ms": round(percentile(alone, 0.5) * 1000, 1),
                    "flows/s": round(counts[kind] / seconds, 2),
                    "CPU ms": meters.ms_per(counts[kind])["all"],
                }
                print(f"{peer.name}, {title}: {row}", file=sys.stderr)
    return found
