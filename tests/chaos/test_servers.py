"""Kafka and PostgreSQL, ended under load and started again by their supervisor."""

import signal

import pytest

from tests.chaos.arena import LONG, TASKS, Field, arena

# How each is told to end: PostgreSQL waits for its clients to leave when it gets SIGTERM, and pools never do.
POLITE = {"kafka": signal.SIGTERM, "postgres": signal.SIGINT}


@pytest.mark.slow
async def test_restart_broker(tmp_path):
    """O1, design's guarantees 2, 3 and 6: the broker may die and come back; what it acknowledged is done, once."""
    async with arena(tmp_path, "broker") as field:
        await restart_each_way(field, "kafka")


@pytest.mark.slow
async def test_restart_database(tmp_path):
    """O1, design's guarantees 2, 3 and 6: so may PostgreSQL, whose commits without waiting are then undone."""
    async with arena(tmp_path, "database") as field:
        await restart_each_way(field, "postgres")


async def restart_each_way(field: Field, server: str) -> None:
    # Twice each way in full: the second finds what the first one's restart left.
    numbers = [signal.SIGKILL, signal.SIGKILL, POLITE[server], POLITE[server]] if LONG else [signal.SIGKILL]
    for number in numbers:

        async def strike(number: signal.Signals = number) -> None:
            await field.restart(server, number)

        await field.wave(f"{number.name} {server}", strike, tasks=TASKS // len(numbers))
