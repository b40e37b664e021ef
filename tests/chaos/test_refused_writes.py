"""Kafka answers, and takes no records: too few replicas are in sync."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.kafka.client.connection import admin_client
from penstock.local.cluster import three_brokers
from penstock.local.supervisor import Supervisor
from penstock.settings import Platform
from tests.chaos.outage_wave import LEASE_MS, OutageScenario, metered, nothing_charged, wave_through
from tests.chaos.scenario import run_scenario
from tests.support.callback_targets import target_server
from tests.support.topics import require_replicas

# The broker that is stopped.
STOPPED = 3
# The shortest stall; the outage is longer.
STALL_S = 20


@pytest.mark.long
@pytest.mark.alone
async def test_topics_that_take_no_records_are_charged_to_no_attempt(tmp_path):
    """S11, T4, O2: no topic takes records, for longer than a stall. A service that writes reports
    it, none ends, and everything goes on by itself."""
    log = (tmp_path / "cluster.log").open("w", encoding="utf-8", buffering=1)
    supervisor = Supervisor(lambda name, line: print(name, line, file=log), run_dir=tmp_path / "cluster-run")
    try:
        async with (
            three_brokers(supervisor, tmp_path / "cluster") as cluster,
            target_server() as target,
            run_scenario(
                tmp_path,
                "refused writes",
                workers=1,
                environment={**metered(), "PENSTOCK_STALL_TIMEOUT_S": str(STALL_S)},
                lease_ms=LEASE_MS,
                kafka=cluster.servers,
                kind=OutageScenario,
            ) as scenario,
        ):
            scenario.start_with(target)
            settings = Platform.load(scenario.deployment.environment)
            async with admin_client(settings) as admin:
                names = [name for name in await admin.list_topics() if name.startswith(settings.prefix)]
            await require_replicas(settings, names, 3)

            @asynccontextmanager
            async def outage() -> AsyncIterator[None]:
                await cluster.brokers[STOPPED].stop()
                yield
                await cluster.brokers[STOPPED].start()

            # Other services report writes only if some of theirs are under way.
            reports = {"gateway": frozenset({"writes"})}
            async with nothing_charged(scenario, target):
                await wave_through(scenario, "no writes", outage, reports, seconds=1.5 * STALL_S)
    finally:
        await asyncio.to_thread(supervisor.close)
        log.close()
