"""State faults in random sequences: topics recreated, tails cut, offsets expired, records deleted,
foreign records, a lagging standby promoted, clocks that jump, and tasks that kill their worker."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.chaos.clocks import deployment_clocks
from tests.chaos.scenario import ENVIRONMENT, LONG, TASKS, run_scenario
from tests.chaos.standby import standby_pair
from tests.chaos.state_kinds import StateFaults
from tests.chaos.state_scenario import StateScenario
from tests.load.callbacks.paced_load import targets_process

SETTINGS = {
    **ENVIRONMENT,
    "PENSTOCK_RECHECK_S": "2",
    "PENSTOCK_CALLBACK_TIMEOUT_S": "5",
    # The targets have no faults: no schedule may be exhausted.
    "PENSTOCK_CALLBACK_SCHEDULE_S": ",".join(["1"] * 30),
}
# Each kind of fault once in the short form, two in a wave. In full, several rounds in new orders.
ROUNDS = 5 if LONG else 1
AT_ONCE = 2
# A worker ends with 1 when it loses its group, and -9 is the killers' work.
STATUSES = {1, 5, -9}


@pytest.mark.long
async def test_state_faults_in_random_order_lose_double_and_forge_nothing(tmp_path, monkeypatch):
    """O1, O2b, O10, S11, W4, W8, C1: over random sequences of state faults each acknowledged task
    succeeds, takes effect once and with its own result. What a fault removed before the platform
    could know is exactly what the ledger names: submissions that Kafka acknowledged and ingest had
    not read, and those that only the lost primary had. The check names moved positions and deleted
    records; after `penstock check --repair` the check is clean."""
    clock, services = deployment_clocks(tmp_path / "clocks", monkeypatch)
    async with (
        targets_process(tmp_path) as targets,
        standby_pair(tmp_path / "postgres") as pair,
        run_scenario(
            tmp_path,
            "state",
            workers=0,
            services=services,
            environment=SETTINGS,
            postgres=pair.url,
            kind=StateScenario,
        ) as scenario,
    ):
        scenario.pair, scenario.callback_targets = pair, targets
        scenario.targets = targets.urls("quick", 10)
        scenario.worker_prefix = clock.prefix("worker") if clock else ()
        for _ in range(2):
            scenario.start_worker()
        faults = StateFaults(scenario, clock)
        keeping = asyncio.create_task(scenario.keep_workers())
        try:
            kinds = list(faults.kinds().items())
            waves = []
            for _ in range(ROUNDS):
                scenario.rng.shuffle(kinds)
                waves += [kinds[at : at + AT_ONCE] for at in range(0, len(kinds), AT_ONCE)]
            for wave in waves:

                async def inject(wave=wave) -> None:
                    for name, fault in wave:
                        scenario.say(name)
                        await fault()

                await scenario.wave(" + ".join(name for name, _ in wave), inject, tasks=TASKS // len(waves))
                scenario.say("every task has ended")
                await scenario.mended()
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
        assert set(scenario.statuses) <= STATUSES, scenario.statuses
