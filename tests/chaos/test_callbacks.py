"""Callbacks during faults: the callbacks service is killed, paused and restarted during calls, and
so are its servers. The targets are a separate process without faults, which counts received
callbacks.

A callback may arrive twice only if a fault occurred between its call and the commit of its outcome.
The test reads these callbacks from PostgreSQL, from the fault until callbacks are settled again and
whenever the service ends by itself.
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

from tests.chaos.run_report import RUN
from tests.chaos.scenario import ENVIRONMENT, LONG, TASKS, Scenario, run_scenario
from tests.chaos.test_servers import CLEAN_STOP
from tests.load.callbacks.paced_load import Targets, targets_process

# Paths at the targets: enough for several partitions with concurrent calls in each.
PATHS = 20
ANSWER_S = 0.5
SETTINGS = {
    **ENVIRONMENT,
    # The difference leaves time on a busy machine, so that only faults repeat callbacks.
    "PENSTOCK_CALLBACK_TIMEOUT_S": "5",
    # The targets have no faults: none may become abnormal, and no schedule may be exhausted.
    "PENSTOCK_CALLBACK_SLOW_S": "4",
    "PENSTOCK_CALLBACK_SCHEDULE_S": ",".join(["1"] * 30),
    # Callbacks that a fault interrupted repeat on this path; the default of five slots is too slow.
    "PENSTOCK_CALLBACK_DIVERTED_SLOTS": "40",
}
# Longer than a session, so that Kafka reassigns the partitions during the pause.
STOP_S = 20 if LONG else 8

_IN_FLIGHT = "SELECT array_agg(id) FROM penstock.callback WHERE attempt > 0 AND finished_at IS NULL"
_NOW = "SELECT now()::text"


class InFlight:
    """The callbacks that were called and not settled during a fault.

    Args:
        scenario: the running scenario.
        targets: the targets of the callbacks.
    """

    def __init__(self, scenario: Scenario, targets: Targets) -> None:
        self._scenario = scenario
        self._targets = targets
        # One set for each fault: each fault may repeat a call once.
        self._in_flight: list[set[str]] = []
        self._injecting = False

    async def record(self) -> None:
        """Adds the callbacks in flight to those of the current fault."""
        self._in_flight[-1].update(await self._scenario.fetch_value(_IN_FLIGHT) or ())

    @property
    def fault_counts(self) -> Counter[str]:
        """The number of faults for each callback in flight."""
        return Counter(name for names in self._in_flight for name in names)

    async def calls_in_flight(self) -> bool:
        """Whether calls to several paths are in flight."""
        await self._targets.collect()
        return self._targets.in_flight.get("well", 0) >= PATHS // 4

    async def inject(self, fault: Callable[[], Any]) -> None:
        """Injects a fault during calls; returns when callbacks are settled again, or none is
        left."""
        await self._scenario.wait_until_true(self.calls_in_flight, "calls are in flight")
        self._injecting = True
        self._in_flight.append(set())
        await self.record()
        await fault()
        await self.record()
        since = await self._scenario.fetch_value(_NOW)

        async def settled_again() -> bool:
            await self.record()
            enqueued = "count(*) FILTER (WHERE finished_at IS NULL) = 0"
            settled = f"count(*) FILTER (WHERE finished_at > '{since}') > 0"
            return await self._scenario.fetch_value(f"SELECT {enqueued} OR {settled} FROM penstock.callback")

        await self._scenario.wait_until_true(settled_again, "callbacks are settled again")
        self._injecting = False

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Reads the callbacks in flight whenever the service ends; its restart takes longer than
        that."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
            assert not watching.done(), "watching ended early"
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        known_exits = self._scenario.deployment.exits("callbacks")
        while True:
            if (exits := self._scenario.deployment.exits("callbacks")) != known_exits:
                known_exits = exits
                if not self._injecting:
                    self._in_flight.append(set())
                await self.record()
            await asyncio.sleep(0.05)


def faults(scenario: Scenario) -> list[tuple[str, Callable[[], Any]]]:
    """The faults in random order, with one server in the short form and both in the full one."""

    async def kill() -> None:
        await scenario.restart("callbacks", signal.SIGKILL)

    async def stop() -> None:
        await scenario.stop_for(STOP_S, scenario.deployment.processes["callbacks"])

    async def restart() -> None:
        await scenario.restart("callbacks", signal.SIGTERM)

    found: list[tuple[str, Callable[[], Any]]] = [
        ("SIGKILL callbacks", kill),
        (f"SIGSTOP callbacks, {STOP_S} s", stop),
        ("SIGTERM callbacks", restart),
    ]
    servers = sorted(CLEAN_STOP) if LONG else [scenario.rng.choice(sorted(CLEAN_STOP))]
    for server in servers:
        numbers = (signal.SIGKILL, CLEAN_STOP[server]) if LONG else (signal.SIGKILL,)
        found += [
            (f"{number.name} {server}", partial(scenario.restart, server, number)) for number in numbers
        ]
    scenario.rng.shuffle(found)
    return found


@pytest.mark.long
async def test_every_callback_is_received(tmp_path):
    """C1, C2, O2b, design's guarantee 5: each callback is received at least once, and more often
    only if a fault interrupted its call. The check is clean."""
    async with (
        targets_process(tmp_path) as targets,
        run_scenario(tmp_path, "callbacks", environment=SETTINGS) as scenario,
    ):
        # Attempts of callbacks to quick targets are recorded ahead of their calls.
        await targets.behave(well={"after_s": ANSWER_S}, quick={"after_s": 0.01})
        scenario.targets = targets.urls("well", PATHS // 2) + targets.urls("quick", PATHS // 2)
        in_flight = InFlight(scenario, targets)
        async with in_flight.watching():
            chosen_faults = faults(scenario)
            for name, fault in chosen_faults:
                await scenario.wave(
                    name,
                    partial(in_flight.inject, fault),
                    tasks=TASKS // (len(chosen_faults) if LONG else 2 * len(chosen_faults)),
                )

            async def settled() -> bool:
                left = "SELECT count(*) FROM penstock.callback WHERE finished_at IS NULL"
                return await scenario.fetch_value(left) == 0

            await scenario.wait_until_true(settled, "every callback is settled")
        await targets.collect()
        received = Counter(targets.ids())
        connection = await asyncpg.connect(scenario.deployment.postgres)
        try:
            rows = await connection.fetch("SELECT id, task_id, state FROM penstock.callback")
        finally:
            await connection.close()
        enqueued = {row["id"] for row in rows}
        twice = {name for name, count in received.items() if count > 1}
        fault_counts = in_flight.fault_counts
        found = {
            "tasks without a callback": range(scenario.acknowledged - len({row["task_id"] for row in rows})),
            "callbacks not delivered": [row["id"] for row in rows if row["state"] != "delivered"],
            "callbacks that were not received": sorted(enqueued - received.keys()),
            "received callbacks without a row": sorted(received.keys() - enqueued),
            "callbacks that repeated more often than faults explain": sorted(
                name for name in twice if received[name] - 1 > fault_counts[name]
            ),
        }
        RUN.note(found)
        RUN.add_sentence(
            f"callbacks: {len(enqueued):,} enqueued, {received.total():,} calls, {len(twice):,} received more than once, of "
            f"{len(fault_counts):,} in flight during a fault"
        )
        broken = {claim: list(offenders)[:5] for claim, offenders in found.items() if offenders}
        assert not broken, f"seed {RUN.seed}: {broken}; {scenario.deployment.log_file}"
