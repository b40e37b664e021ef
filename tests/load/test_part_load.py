"""What a task costs at part load, beside the bare loop of the same run."""

from __future__ import annotations

import pytest
from benchmarks.part_load import RATIO, figures

pytestmark = pytest.mark.long

# Alone on a machine it is 1.1. Neighbours take caches away, and polls then find fewer tasks.
MOST = 2.2


async def test_a_task_at_part_load_costs_little_more_than_the_bare_loop():
    """At 80 tasks/s, three stages in Penstock cost about the CPU of the bare loop, which only
    moves rows and records, without leases, retries, history or callbacks."""
    found = await figures(rate=80, seconds=8)
    assert found["Penstock"][RATIO] <= MOST, found
