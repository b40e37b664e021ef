"""Kafka and PostgreSQL, stopped under load and restarted by their supervisor."""

import signal

import pytest

from tests.chaos.scenario import LONG, TASKS, Scenario, run_scenario

# The signal for a clean stop. On SIGTERM, PostgreSQL would wait for its clients, and pools stay.
CLEAN_STOP = {"kafka": signal.SIGTERM, "postgres": signal.SIGINT}


@pytest.mark.long
async def test_a_restarted_broker_loses_no_task(tmp_path):
    """O1, design's guarantees 2, 3 and 6: after a restart of the broker, acknowledged tasks are
    done once."""
    async with run_scenario(tmp_path, "broker") as scenario:
        await restart_each_way(scenario, "kafka")


@pytest.mark.long
async def test_a_restarted_database_loses_no_task(tmp_path):
    """O1, design's guarantees 2, 3 and 6: a restart of PostgreSQL undoes asynchronous commits
    and loses no task."""
    async with run_scenario(tmp_path, "database") as scenario:
        await restart_each_way(scenario, "postgres")


async def restart_each_way(scenario: Scenario, server: str) -> None:
    # Twice for each signal in the full form: the second restart follows a recovery.
    numbers = (
        [signal.SIGKILL, signal.SIGKILL, CLEAN_STOP[server], CLEAN_STOP[server]] if LONG else [signal.SIGKILL]
    )
    for number in numbers:

        async def inject(number: signal.Signals = number) -> None:
            await scenario.restart(server, number)

        await scenario.wave(f"{number.name} {server}", inject, tasks=TASKS // len(numbers))
