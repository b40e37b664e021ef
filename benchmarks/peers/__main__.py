"""Penstock beside other systems: one run, one machine, the same job.

    make bench-peers                 # also installs benchmarks/peers/requirements.txt
    python -m benchmarks.peers [--seconds 15] [--rates 30 80 300] [--peers table Celery]
                               [--no-kills | --only-kills] [--apart 2] [--json]

The job has three stages that do nothing, with contexts of 200 bytes, submitted one by one, and one
worker process (for Celery a worker of two child processes). Each peer is started and stopped in
turn with its own servers, from packages, set up as its documentation advises: its module says how
and why.

CPU is that of all processes: servers, services, worker and client. A latency begins before the
submission. It ends in the first stage's handler, or at the end of the task by the peer's own
records; where a peer keeps none, at the end of the last handler. A rate is sustained when 99 % of
the tasks end within 2 s of the last submission. At full speed up to 2,000 tasks are unfinished.

The losses are measured apart, with stages that take time: see `benchmarks.peers.kills`.

When all peers were measured it writes benchmarks/results/peers.json and peers_kills.json, and the
tables in README.md and docs/explanation/comparison.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measurements import save
from benchmarks.peers import tables
from benchmarks.peers.catalogue import PEERS, Peer
from benchmarks.peers.kills import kills
from benchmarks.peers.measure import measure
from benchmarks.peers.running import running

KILLS_AT_ONCE = 4

Found = dict[str, dict[str, Any]]


async def at_rates(peers: Sequence[Peer], rates: Sequence[float], seconds: float) -> Found:
    """Measures peers in turn."""
    found = {}
    for peer in peers:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            async with running(peer, Path(folder)) as one:
                found[peer.name] = await measure(one, rates, seconds)
    return found


async def after_kills(peers: Sequence[Peer], apart_s: float) -> Found:
    """Kills the parts of peers: a few peers at once, because most of the time is waiting."""
    places = asyncio.Semaphore(KILLS_AT_ONCE)

    async def one(peer: Peer) -> dict[str, Any]:
        async with places:
            return await kills(peer, apart_s)

    found = await asyncio.gather(*map(one, peers))
    return dict(zip([peer.name for peer in peers], found, strict=True))


def main() -> int:
    """Measures, reports and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15, help="duration of each rate")
    parser.add_argument("--rates", type=float, nargs="+", default=[30, 80, 300], help="tasks a second")
    parser.add_argument("--peers", nargs="+", default=[""], help="parts of their names")
    parser.add_argument("--kills", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only-kills", action="store_true", help="no rates")
    parser.add_argument("--apart", type=float, default=2, help="seconds between kills of a worker")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and write nothing")
    arguments = parser.parse_args()
    peers = [peer for peer in PEERS if any(part in peer.name for part in arguments.peers)]
    found: dict[str, Found] = {}
    if not arguments.only_kills:
        found["peers"] = asyncio.run(at_rates(peers, arguments.rates, arguments.seconds))
    if arguments.kills:
        found["peers_kills"] = asyncio.run(after_kills(peers, arguments.apart))
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, figures in found.items():
        print(tables.whole(figures) if name == "peers" else tables.losses(figures))
        # A part of the peers would replace the figures of all.
        if len(peers) == len(PEERS):
            _publish(name, figures)
    return 0


def _publish(name: str, figures: Found) -> None:
    save(name, figures, {})
    if name == "peers":
        tables.write(tables.README, "peers", tables.short(figures))
        tables.write(tables.COMPARISON, "peers", tables.whole(figures))
    else:
        tables.write(tables.COMPARISON, "losses", tables.losses(figures))


if __name__ == "__main__":
    sys.exit(main())
