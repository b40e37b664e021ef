"""Faults of all kinds, mixed at random: state faults, outages, frozen and killed processes, and
neighbours that lock, flood, last long or vanish. No type is delayed by the fault of another."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain

import pytest

from penstock.client import Client
from tests.chaos import bystander, link
from tests.chaos.clocks import deployment_clocks
from tests.chaos.mixed_kinds import Neighbours, Shared
from tests.chaos.mixed_scenario import Kind, MixedScenario
from tests.chaos.run_report import RUN
from tests.chaos.scenario import LEASE_MS, LONG, SEED, TASKS, run_scenario
from tests.chaos.standby import standby_pair
from tests.chaos.state_kinds import StateFaults
from tests.chaos.test_state_faults import SETTINGS, STATUSES
from tests.load.callbacks.paced_load import targets_process

# These waves instead of random ones: "long tasks + worker frozen; kafka away". It finds
# which fault of a wave delays the bystander.
WAVES = os.environ.get("PENSTOCK_CHAOS_WAVES", "")
# In the short form, faults of what all types share: one of each family.
SHORT_SHARED = 1
# As of the type `count`: the shortest lease, and enough attempts for every fault.
POLICY = {"lease_ms": LEASE_MS, "max_attempts": 50, "retry_base_ms": 100, "retry_max_ms": 1_000}
REPLICAS = {"gateway": 1, "task-sync": 2, "heartbeats": 2, "stages": 2, "callbacks": 2, "tasklogs": 1}


def plan(rng: random.Random, neighbours: Neighbours, shared: Shared) -> list[list[Kind]]:
    """The waves of a run. Each kind is in one of them at least; in the short form, each neighbour,
    and one of each family of the others."""
    quiet, loud = neighbours.quiet(), neighbours.loud()
    families = [shared.states(), shared.outages(), shared.processes()]
    if WAVES:
        kinds = {kind.name: kind for kind in [*quiet, *loud, *chain.from_iterable(families)]}
        return [[kinds[name.strip()] for name in wave.split("+")] for wave in WAVES.split(";")]
    for kinds in (quiet, loud, *families):
        rng.shuffle(kinds)
    # Neighbours alone: nothing excuses a delay.
    together = 2 if LONG else 5
    alone = [*quiet, *loud]
    rng.shuffle(alone)
    waves = [alone[at : at + together] for at in range(0, len(alone), together)]
    for family in families:
        for kind in family if LONG else family[:SHORT_SHARED]:
            beside = quiet if family is families[0] else [*quiet, *loud]
            waves.append([kind, rng.choice(beside)])
    rng.shuffle(waves)
    return waves


async def run_waves(scenario: MixedScenario, waves: Sequence[Sequence[Kind]]) -> None:
    for kinds in waves:
        await scenario.mixed_wave(kinds, tasks=TASKS // len(waves))


# It judges delays of five seconds.
@pytest.mark.alone
@pytest.mark.long
async def test_mixed_faults_lose_nothing_and_delay_no_other(tmp_path, monkeypatch):
    """O1, S7, S11 to S13, W4, W8, C1: over random waves of faults of all kinds each acknowledged
    task succeeds once, and `penstock check` is clean after each wave. Single tasks of a type that
    no fault concerns end, and their callbacks arrive, within five seconds. The time in which a
    server that all share is away does not count, nor the twenty seconds after its return; nor the
    ten seconds in which another replica takes over from a frozen one. No process of a service ends
    by itself more than once."""
    clock, services = deployment_clocks(tmp_path / "clocks", monkeypatch)
    with ExitStack() as stack:
        if link.missing() is None:
            worker_link = stack.enter_context(link.link(random.Random(f"{SEED}/mixed")))
        else:
            worker_link = None
            RUN.add_sentence(f"mixed: without links that fail, since {link.missing()}")
        async with (
            targets_process(tmp_path) as targets,
            standby_pair(tmp_path / "postgres") as pair,
            run_scenario(
                tmp_path,
                "mixed",
                workers=0,
                services=services,
                replicas=REPLICAS,
                environment=SETTINGS,
                postgres=pair.url,
                kind=MixedScenario,
            ) as scenario,
        ):
            scenario.pair, scenario.callback_targets = pair, targets
            scenario.targets = targets.urls("quick", 10)
            scenario.worker_prefix = clock.prefix("worker") if clock else ()
            async with Client(scenario.deployment.gateway_url) as client:
                for name in (bystander.TYPE, "flood"):
                    await client.register_type(name, first_stage="one", **POLICY)
            for _ in range(2):
                scenario.start_worker()
                scenario.workers.start(environment={"LEDGER_TYPE": bystander.TYPE})
            scenario.workers.start(environment={"LEDGER_TYPE": "flood"})
            if worker_link:
                scenario.workers.start(prefix=worker_link.prefix)
            neighbours = Neighbours(scenario, worker_link)
            shared = Shared(scenario, StateFaults(scenario, clock))
            waves = plan(scenario.rng, neighbours, shared)
            await scenario.warm_up()
            keeping = asyncio.create_task(scenario.keep_workers())
            try:
                await run_waves(scenario, waves)
            finally:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping
            assert set(scenario.statuses) <= STATUSES, scenario.statuses
