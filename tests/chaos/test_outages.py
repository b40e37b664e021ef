"""Each server is away, or takes no writes, for longer than a session.

No attempt is charged for it, no service ends, and all go on by themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.chaos.outage_wave import LEASE_MS, OutageScenario, metered, nothing_charged, wave_through
from tests.chaos.outages import OUTAGES, Outage
from tests.chaos.scenario import run_scenario
from tests.support.callback_targets import target_server


@pytest.mark.long
async def test_outages_are_charged_to_no_attempt(tmp_path):
    """S11, T4, O2: a server is away or full while tasks run, submissions come and callbacks leave.
    Every service reports the server by name, none ends more than once, and all go on by themselves.
    Every task succeeds, without a failure or a loss."""
    async with (
        target_server() as target,
        run_scenario(
            tmp_path, "outages", workers=1, environment=metered(), lease_ms=LEASE_MS, kind=OutageScenario
        ) as scenario,
    ):
        scenario.start_with(target)
        for name in scenario.rng.sample(sorted(OUTAGES), len(OUTAGES)):
            outage = OUTAGES[name]

            @asynccontextmanager
            async def during(outage: Outage = outage) -> AsyncIterator[None]:
                async with outage.during(scenario):
                    if outage.refuses:
                        await _refuses(scenario.deployment.gateway_url)
                    yield

            reports = dict.fromkeys(outage.services, frozenset({outage.probe}))
            async with nothing_charged(scenario, target):
                await wave_through(scenario, name, during, reports, ended=frozenset({0, 1}), recovery_s=120)


async def _refuses(url: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/tasks", json={"type": "count"}) as response,
    ):
        body = await response.text()
        assert response.status == 503, body
        assert int(response.headers["Retry-After"]) >= 1
        assert "PostgreSQL" in body
