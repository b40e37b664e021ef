"""A wave of tasks through an outage that every service must report and outlive."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp

from penstock.local.deployment import METRICS_PORT, SERVICES
from penstock.local.ports import choose_port
from tests.chaos.outages import in_database
from tests.chaos.scenario import ENVIRONMENT, LONG, TASKS, Scenario
from tests.support.callback_targets import Target
from tests.support.waiting import wait_until

# Longer than a session (6 s), and shorter than a lease: a worker that is cut off for a lease stops
# its attempts (W6).
OUTAGE_S = 60 if LONG else 10
LEASE_MS = 300_000
# Seconds from the end of an outage until every service is ready.
RECOVERY_S = 30
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

    async def submit_more(self, count: int) -> None:
        """Submits tasks of the wave that runs."""
        await self._submit(len(self._waves), count)

    def start_with(self, target: Target) -> None:
        """Gives the tasks callbacks, and starts a worker of the gateway."""
        self.targets = [f"{target.url}/{number}" for number in range(5)]
        self.workers.start(environment={"PENSTOCK_WORKER_GATEWAY": self.deployment.gateway_url})


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


def metered() -> dict[str, str]:
    """Settings of the services, with metrics and health on."""
    return {**ENVIRONMENT, METRICS_PORT: str(choose_port())}


async def wave_through(
    scenario: OutageScenario,
    name: str,
    outage: Callable[[], AbstractAsyncContextManager[None]],
    reports: Mapping[str, frozenset[str]],
    *,
    ended: frozenset[int] = frozenset({0}),
    seconds: float = OUTAGE_S,
    recovery_s: float = RECOVERY_S,
) -> None:
    """Runs a wave of tasks, and an outage while they run.

    Args:
        scenario: without another fault, with the settings of `metered`.
        name: of the outage.
        outage: takes a server away for the time of a block.
        reports: the services that must report it, each with the checks of which one must fail.
        ended: how often a service may end.
        seconds: least duration of the outage.
        recovery_s: seconds until every service is ready again.
    """
    found: dict[str, dict[str, str]] = {}
    recovered_s: dict[str, float] = {}

    async def reported(service: str) -> bool:
        answer = await readiness_of(scenario.deployment.metrics_ports[service])
        found[service] = {name: text for name, text in answer.get("checks", {}).items() if text != "ok"}
        return bool(found[service].keys() & reports[service])

    async def is_ready(service: str) -> bool:
        return (await readiness_of(scenario.deployment.metrics_ports[service])).get("status") == "ready"

    all_reported = asyncio.Event()

    async def keep_submitting() -> None:
        # A database whose disk is full takes rows as long as its files have room, and a service
        # reports only a write that was refused.
        while not all_reported.is_set():
            await scenario.submit_more(20)
            await asyncio.sleep(0.2)

    async def take_away() -> None:
        loop = asyncio.get_running_loop()
        async with outage():
            until_s = loop.time() + seconds
            for service in reports:
                await wait_until(lambda service=service: reported(service), what=f"{service} reports it")
            all_reported.set()
            await asyncio.sleep(max(0.0, until_s - loop.time()))

    async def inject() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_submitting())
            await take_away()
            back_s = loop.time()
        for service in SERVICES:
            await wait_until(
                lambda service=service: is_ready(service),
                timeout=recovery_s,
                what=f"{service} is ready again",
            )
            recovered_s[service] = round(loop.time() - back_s, 1)

    before = {service: scenario.deployment.exits(service) for service in SERVICES}
    await scenario.wave(name, inject, tasks=min(TASKS, 1_000) // 5)
    exits = {service: scenario.deployment.exits(service) - before[service] for service in SERVICES}
    sys.stderr.write(f"\n{name}: ended {exits}, reported {found}, ready after {recovered_s} s\n")
    assert set(exits.values()) <= ended, (exits, scenario.deployment.log_file)


@asynccontextmanager
async def nothing_charged(scenario: OutageScenario, target: Target) -> AsyncIterator[None]:
    """No attempt of the tasks in the block is charged, and each has its callback in the end."""
    yield
    charged = await in_database(scenario, CHARGED)
    assert not charged, (len(charged), charged[:5], scenario.deployment.log_file)
    unsettled = "SELECT count(*) = 0 FROM penstock.callback WHERE finished_at IS NULL"
    await wait_until(
        lambda: scenario.fetch_value(unsettled), timeout=120, every=0.2, what="every callback is settled"
    )
    assert not await scenario.fetch_value("SELECT count(*) FROM penstock.callback WHERE state = 'dead'")
    succeeded = {name for name in target.ids() if "-succeeded-" in name}
    assert len(succeeded) == scenario.acknowledged
