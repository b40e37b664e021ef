"""What is lost when a part of a peer is killed.

Tasks come at 20 a second, with stages of 10 ms, so that there is work under way and a backlog after
each kill. The worker is killed five times, 2 s apart or as `--apart` says; a server or all services
of Penstock once. The load ends as long after the last kill of the worker. SIGKILL goes to
the part only, and its supervisor starts it again after half a second. The benchmark then waits up
to 100 s for the end of every task whose submission was acknowledged. The leases and time-outs of
the peers that matter here are 30 s.

`lost` counts acknowledged tasks whose last stage did not run within that time, and that the peer
no longer keeps; `waiting` counts those that it keeps. `repeated` counts tasks whose first or last
stage ran more than once.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import Peer
from benchmarks.peers.running import WORKER, Running, running

RATE, STAGE_S, KILLS = 20.0, 0.01, 5
WITHIN_S = 100.0


async def kills(peer: Peer, apart_s: float) -> dict[str, dict[str, Any]]:
    """Kills each part of a peer in turn; returns what was found, by part."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with running(peer, Path(folder), STAGE_S) as one:
            found = {}
            for number, (fault, names) in enumerate(one.victims.items()):
                found[fault] = await _kill(one, names, 1 + number * 100_000, apart_s)
                print(f"{peer.name}, kill -9 of {fault}: {found[fault]}", file=sys.stderr)
    return found


async def _kill(one: Running, names: list[str], first: int, apart_s: float) -> dict[str, Any]:
    # The same load for each part.
    seconds = (KILLS + 1) * apart_s
    load = asyncio.create_task(one.command(do="pace", first=first, rate=RATE, seconds=seconds))
    for _ in range(KILLS if names == [WORKER] else 1):
        await asyncio.sleep(apart_s)
        one.kill(names)
    killed = time.monotonic()
    answer = await load
    submitted = answer["acknowledged"]
    done = await one.wait_ended(submitted, WITHIN_S)
    missing = sum(number not in one.ledger.ends for number in submitted)
    waiting = min(missing, await one.waiting()) if missing else 0
    return {
        "acknowledged": len(submitted),
        "refused": len(answer["refused"]),
        "lost": missing - waiting,
        "waiting": waiting,
        "repeated": len(one.ledger.repeated.intersection(submitted)),
        "all ended s after the last kill": round(done - killed, 1) if done else None,
    }
