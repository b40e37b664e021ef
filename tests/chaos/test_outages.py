"""Each server is away, or takes no writes, for longer than a session.

No attempt is charged for it, no service ends, and all go on by themselves.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
import pytest

from penstock.local.deployment import METRICS_PORT, SERVICES
from penstock.local.ports import choose_port
from tests.chaos.outages import OUTAGES, in_database
from tests.chaos.scenario import ENVIRONMENT, LONG, TASKS, Scenario, run_scenario
from tests.support.callback_targets import target_server
from tests.support.waiting import wait_until

# Longer than a session (6 s), and shorter than a lease: a worker that is cut off for a lease stops
# its attempts (W6).
OUTAGE_S = 60 if LONG else 10
LEASE_MS = 300_000
# Above the inline limit: each stage reads and stores an object.
PADDING = "x" * 5_000

CHARGED = """
SELECT t.id, t.failures, t.losses, a.outcome, a.error, a.worker
FROM penstock.task t LEFT JOIN penstock.attempt a ON a.task_id = t.id AND a.outcome NOT IN ('next', 'done')
WHERE t.failures > 0 OR t.losses > 0
"""


class OutageScenario(Scenario):
    """Tasks that never fail by themselves; every second one has large contexts."""

    def _draft(self, wave: int) -> dict[str, Any]:
        draft = super()._draft(wave)
        draft["context"]["fails"] = None
        if self.rng.random() < 0.5:
            draft["context"]["padding"] = PADDING
        return draft


async def readiness_of(port: int) -> dict[str, Any]:
    """The document of /readyz; empty without an answer."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/readyz") as response,
        ):
            return await response.json()
    except aiohttp.ClientError:
        return {}


@pytest.mark.long
@pytest.mark.parametrize("name", OUTAGES)
async def test_an_outage_is_charged_to_no_attempt(tmp_path, name):
    """S11, T4, O2: a server is away or full while tasks run, submissions come and callbacks leave.
    Every service reports the server by name, none ends more than once, and all go on by themselves.
    Every task succeeds, without a failure or a loss."""
    outage = OUTAGES[name]
    environment = {**ENVIRONMENT, METRICS_PORT: str(choose_port())}
    async with (
        target_server() as target,
        run_scenario(
            tmp_path, name, workers=1, environment=environment, lease_ms=LEASE_MS, kind=OutageScenario
        ) as scenario,
    ):
        scenario.targets = [f"{target.url}/{number}" for number in range(5)]
        scenario.workers.start(environment={"PENSTOCK_WORKER_GATEWAY": scenario.deployment.gateway_url})
        found: dict[str, str] = {}

        async def reported(service: str) -> bool:
            checks = (await readiness_of(scenario.deployment.metrics_ports[service])).get("checks", {})
            found[service] = checks.get(outage.probe, "ok")
            return found[service] != "ok"

        async def recovered(service: str) -> bool:
            return (await readiness_of(scenario.deployment.metrics_ports[service])).get("status") == "ready"

        async def inject() -> None:
            loop = asyncio.get_running_loop()
            async with outage.during(scenario):
                until_s = loop.time() + OUTAGE_S
                if outage.refuses:
                    await _refuses(scenario.deployment.gateway_url)
                for service in outage.services:
                    await wait_until(lambda service=service: reported(service), what=f"{service} reports it")
                await asyncio.sleep(max(0.0, until_s - loop.time()))
            for service in SERVICES:
                await wait_until(lambda service=service: recovered(service), what=f"{service} is ready again")

        ended = {service: scenario.deployment.exits(service) for service in SERVICES}
        await scenario.wave(name, inject, tasks=min(TASKS, 1_000) // 5)
        ended = {service: scenario.deployment.exits(service) - before for service, before in ended.items()}
        sys.stderr.write(f"\n{name}: ended {ended}, reported {found}\n")
        charged = await in_database(scenario, CHARGED)
        assert not charged, (len(charged), charged[:5], scenario.deployment.log_file)
        assert max(ended.values()) <= 1, (ended, scenario.deployment.log_file)
        await wait_until(
            lambda: scenario.fetch_value(
                "SELECT count(*) = 0 FROM penstock.callback WHERE finished_at IS NULL"
            ),
            timeout=120,
            every=0.2,
            what="every callback is settled",
        )
        succeeded = {name for name in target.ids() if "-succeeded-" in name}
        assert len(succeeded) == scenario.acknowledged


async def _refuses(url: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/tasks", json={"type": "count"}) as response,
    ):
        body = await response.text()
        assert response.status == 503, body
        assert int(response.headers["Retry-After"]) >= 1
        assert "PostgreSQL" in body
