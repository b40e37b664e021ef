"""Callbacks through faults: the callbacks service is killed, stopped and restarted while it calls, and what it stands on is
restarted, too. The targets are a process of their own that no fault strikes: they count what they are sent.

A callback may come twice only if a fault met it between its call and the moment when PostgreSQL knew what came of it. Those
are looked up in PostgreSQL from the fault's signal until callbacks are settled again, and whenever the service ends of itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import asyncpg
import pytest

from tests.chaos.arena import ENVIRONMENT, LONG, TASKS, Field, arena
from tests.chaos.figures import RUN
from tests.chaos.test_servers import POLITE
from tests.load.callbacks.arena import Targets, targets_process

# Paths at the targets: several partitions, and more than one call at a time for each.
PATHS = 20
ANSWER_S = 0.5
SETTINGS = {
    **ENVIRONMENT,
    # Between the two a machine that is busy has time: what comes twice shall be the faults' doing.
    "PENSTOCK_CALLBACK_TIMEOUT_S": "5",
    "PENSTOCK_CALLBACK_HORIZON_S": "10",
    "PENSTOCK_CALLBACK_REPUBLISH_S": "5",
    # No fault here is a target's: none is to become abnormal or to have its callbacks die.
    "PENSTOCK_CALLBACK_SLOW_S": "4",
    "PENSTOCK_CALLBACK_SCHEDULE_S": ",".join(["1"] * 30),
    # What a fault has met comes again this way, and in good time: by default five at a time.
    "PENSTOCK_CALLBACK_DIVERTED_SLOTS": "40",
    "PENSTOCK_CALLBACK_DIVERTED_TARGET_SLOTS": "4",
}
# Above a session, so that the group gives its partitions away meanwhile.
STOP_S = 20 if LONG else 8

_IN_FLIGHT = "SELECT array_agg(id) FROM penstock.callback WHERE attempt > 0 AND finished_at IS NULL"
_NOW = "SELECT now()::text"


class InFlight:
    """Which callbacks were called, and not settled, while a fault lasted.

    Args:
        field: of the scenario.
        targets: that are called.
    """

    def __init__(self, field: Field, targets: Targets) -> None:
        self._field = field
        self._targets = targets
        # One a fault: a call may come again once for each that met it.
        self._met: list[set[str]] = []
        self._striking = False

    async def look(self) -> None:
        """Adds those that are in flight now to those that this fault has met."""
        self._met[-1].update(await self._field.ask(_IN_FLIGHT) or ())

    @property
    def met(self) -> Counter[str]:
        """How many faults met each."""
        return Counter(name for names in self._met for name in names)

    async def begun(self) -> bool:
        """Whether the targets are being called, on several paths at once."""
        await self._targets.collect()
        return self._targets.under_way.get("well", 0) >= PATHS // 4

    async def strike(self, fault: Callable[[], Any]) -> None:
        """A fault in the midst of calls; returns when callbacks are settled again, or none is left."""
        await self._field.until(self.begun, "calls are under way")
        self._striking = True
        self._met.append(set())
        await self.look()
        await fault()
        await self.look()
        since = await self._field.ask(_NOW)

        async def over() -> bool:
            await self.look()
            owed = "count(*) FILTER (WHERE finished_at IS NULL) = 0"
            settled = f"count(*) FILTER (WHERE finished_at > '{since}') > 0"
            return await self._field.ask(f"SELECT {owed} OR {settled} FROM penstock.callback")

        await self._field.until(over, "callbacks are settled again")
        self._striking = False

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks whenever the service ends, by a fault or by itself: it takes longer than that to come back."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
            assert not watching.done(), "nobody looked on"
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        seen = self._field.deployment.exits("callbacks")
        while True:
            if (exits := self._field.deployment.exits("callbacks")) != seen:
                seen = exits
                if not self._striking:
                    self._met.append(set())
                await self.look()
            await asyncio.sleep(0.05)


def faults(field: Field) -> list[tuple[str, Callable[[], Any]]]:
    """What strikes, in the order of this seed: a server in the short form, both in the full one."""

    async def kill() -> None:
        await field.restart("callbacks", signal.SIGKILL)

    async def stop() -> None:
        await field.stop_for(STOP_S, field.deployment.processes["callbacks"])

    async def restart() -> None:
        await field.restart("callbacks", signal.SIGTERM)

    found: list[tuple[str, Callable[[], Any]]] = [
        ("SIGKILL callbacks", kill),
        (f"SIGSTOP callbacks, {STOP_S} s", stop),
        ("SIGTERM callbacks", restart),
    ]
    servers = sorted(POLITE) if LONG else [field.chance.choice(sorted(POLITE))]
    for server in servers:
        numbers = (signal.SIGKILL, POLITE[server]) if LONG else (signal.SIGKILL,)
        found += [(f"{number.name} {server}", partial(field.restart, server, number)) for number in numbers]
    field.chance.shuffle(found)
    return found


@pytest.mark.slow
async def test_every_callback_owed_is_received(tmp_path):
    """C1, C2, O2b, design's guarantee 5: each is received at least once, more often only if a fault met its call, and the
    check is clean."""
    async with (
        targets_process(tmp_path) as targets,
        arena(tmp_path, "callbacks", environment=SETTINGS) as field,
    ):
        # Attempts to the quick ones are written down ahead of their calls.
        await targets.behave(well={"after_s": ANSWER_S}, quick={"after_s": 0.01})
        field.targets = targets.urls("well", PATHS // 2) + targets.urls("quick", PATHS // 2)
        flight = InFlight(field, targets)
        async with flight.watched():
            struck = faults(field)
            for name, fault in struck:
                await field.wave(
                    name,
                    partial(flight.strike, fault),
                    tasks=TASKS // (len(struck) if LONG else 2 * len(struck)),
                )

            async def settled() -> bool:
                left = "SELECT count(*) FROM penstock.callback WHERE finished_at IS NULL"
                return await field.ask(left) == 0

            await field.until(settled, "every callback is settled")
        await targets.collect()
        received = Counter(targets.ids())
        connection = await asyncpg.connect(field.deployment.postgres)
        try:
            rows = await connection.fetch("SELECT id, task_id, state FROM penstock.callback")
        finally:
            await connection.close()
        owed = {row["id"] for row in rows}
        twice = {name for name, count in received.items() if count > 1}
        met = flight.met
        found = {
            "callbacks not owed for a task": range(
                field.acknowledged - len({row["task_id"] for row in rows})
            ),
            "callbacks not delivered": [row["id"] for row in rows if row["state"] != "delivered"],
            "callbacks owed and never received": sorted(owed - received.keys()),
            "callbacks received and not owed": sorted(received.keys() - owed),
            "callbacks received again more often than faults met them": sorted(
                name for name in twice if received[name] - 1 > met[name]
            ),
        }
        RUN.note(found)
        RUN.say(
            f"callbacks: {len(owed):,} owed, {received.total():,} calls, {len(twice):,} received more than once, of "
            f"{len(met):,} that a fault met in flight"
        )
        broken = {claim: list(offenders)[:5] for claim, offenders in found.items() if offenders}
        assert not broken, f"seed {RUN.seed}: {broken}; {field.deployment.log_file}"
