"""100,000 leases on one heartbeat processor: the benchmark with shorter leases."""

from __future__ import annotations

import asyncio
import sys

import pytest
from benchmarks.heartbeats import measure

TASKS, WORKERS, LEASE_S = 100_000, 1_000, 20.0
# The benchmark finds 135 MiB and a sixth of a core with leases of 60 s. A third of the lease is
# three times the heartbeats.
MOST_MIB, MOST_CORE = 300, 0.9


@pytest.mark.long
@pytest.mark.alone
async def test_one_processor_watches_100_000_leases() -> None:
    """H11, H8: one heartbeat processor watches 100,000 running tasks within 300 MiB, and less than
    a core. No attempt with heartbeats expires. Those of lost workers do, within two leases."""
    # An attempt that expires while the others begin would be waited for without end.
    async with asyncio.timeout(300):
        found = await measure(TASKS, WORKERS, LEASE_S, seconds=5)
    sys.stderr.write(f"\n{found}\n")
    assert found["false expiries"] == found["leases lost by workers"] == 0
    assert found["memory (MiB)"] <= MOST_MIB
    assert found["CPU of the processor (% of a core)"] <= 100 * MOST_CORE
    assert LEASE_S <= found["found p50 (s)"] <= found["found p99 (s)"] <= 2 * LEASE_S
