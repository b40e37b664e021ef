"""Flows beside DBOS and Celery's canvas: one run, one machine.

    make bench-flow-peers            # also installs benchmarks/peers/requirements.txt
    python -m benchmarks.flow_peers [--rounds 20] [--flows 200] [--joins 4]

Three flows whose tasks do nothing: a chain of three, a join of 1,000 items, and ten nested levels
of a task each. The time is that from the submission of a flow, alone, to its end by the system's
own records (Celery keeps none: the end of its last task). Flows a second and CPU are those of many
flows at once; CPU is that of all processes, servers and client included. Each system is set up as
its module in `benchmarks/peers` says.

It writes benchmarks/results/flow_peers.json and the table in docs/explanation/comparison.md.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measurements import percentile, report
from benchmarks.peers import tables
from benchmarks.peers.catalogue import FLOW_PEERS, Peer
from benchmarks.peers.measure import Meters, Numbers
from benchmarks.peers.running import Running, running

KINDS = {"chain": "chain of 3", "join": "join of 1,000", "nest": "nesting of 10"}
WITHIN_S = 120.0
WARM_UP_FLOWS = 100

Figures = dict[str, Any]


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


async def measure(peer: Peer, rounds: int, counts: dict[str, int]) -> dict[str, Figures]:
    """Measures a system; returns its figures by kind of flow."""
    found: dict[str, Figures] = {}
    numbers = Numbers()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with running(peer, Path(folder)) as one:
            for kind, title in KINDS.items():
                await _submit(one, numbers, kind, min(WARM_UP_FLOWS, max(1, counts[kind] // 2)))
                alone: list[float] = []
                for _ in range(max(3, rounds // 4) if kind == "join" else rounds):
                    submitted, _seconds = await _submit(one, numbers, kind, 1)
                    alone += await _ends(one, submitted)
                meters = Meters(one)
                _numbers, seconds = await _submit(one, numbers, kind, counts[kind])
                found[kind] = {
                    "p50 ms": round(percentile(alone, 0.5) * 1000, 1),
                    "flows/s": round(counts[kind] / seconds, 2),
                    "CPU ms": meters.ms_per(counts[kind])["all"],
                }
                print(f"{peer.name}, {title}: {found[kind]}", file=sys.stderr)
    return found


async def run(rounds: int, counts: dict[str, int]) -> int:
    """Measures all systems in turn and reports."""
    figures = {}
    for peer in FLOW_PEERS:
        for kind, of_kind in (await measure(peer, rounds, counts)).items():
            figures[f"{peer.name}, {KINDS[kind]}"] = of_kind
    status = report("flow_peers", figures, {})
    tables.write(tables.COMPARISON, "flows", tables.flows(figures))
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="flows submitted alone; a quarter of joins")
    parser.add_argument("--flows", type=int, default=200, help="flows at once")
    parser.add_argument("--joins", type=int, default=4, help="joins at once")
    arguments = parser.parse_args()
    by_kind = {"chain": arguments.flows, "join": arguments.joins, "nest": arguments.flows}
    sys.exit(asyncio.run(run(arguments.rounds, by_kind)))
