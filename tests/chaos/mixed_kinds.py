"""The faults of the mixed scenario beside the state faults: neighbours that lock, flood, last long
or freeze, servers that are away or slow, and frozen processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from penstock.client import Client
from tests.chaos import bystander, outages
from tests.chaos.link import Link
from tests.chaos.mixed_scenario import Excuse, Kind, MixedScenario
from tests.chaos.scenario import LONG, TIMEOUT_S
from tests.chaos.state_kinds import StateFaults

# Longer than the bound of the delays, a lease and a session: a bystander that waits for the end of
# the fault is noticed.
NEIGHBOUR_S = 10.0 if LONG else 8.0
OUTAGE_S = 10.0 if LONG else 5.0
# Longer than a takeover, and shorter than the limit of a stall.
FROZEN_S = 15.0 if LONG else 11.0
FLOOD = 2_000 if LONG else 300
NEW_TYPES = 30 if LONG else 10
# More than the slots of one of the bystander's two workers, and fewer than those of both.
LONG_TASKS = 10

TEN_ROWS = """
SELECT FROM penstock.task WHERE type = 'count' AND finished_at IS NULL ORDER BY id LIMIT 10 FOR UPDATE SKIP LOCKED
"""
ALL_ROWS = """
WITH type AS (SELECT FROM penstock.task_type WHERE name = 'count' FOR UPDATE),
     task AS (SELECT FROM penstock.task WHERE type = 'count' AND finished_at IS NULL FOR UPDATE SKIP LOCKED)
SELECT (SELECT count(*) FROM type), (SELECT count(*) FROM task)
"""
# State faults that concern the bystander's type only as long as they last.
_OWN_STATE = {"killers", "foreign records"}


class Neighbours:
    """Faults that concern only another type, tenant or worker.

    Args:
        scenario: the running scenario.
        link: the link of a worker of the type `count`; None when this machine has no such links.
    """

    def __init__(self, scenario: MixedScenario, link: Link | None) -> None:
        self._scenario = scenario
        self._rng = scenario.rng
        self._link = link
        self._count = 0

    def quiet(self) -> list[Kind]:
        """Those that combine with every other fault."""
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "ten rows locked": lambda: self._locked(TEN_ROWS),
            "a type's rows locked": lambda: self._locked(ALL_ROWS),
            "worker frozen": self._worker_frozen,
            "callback target hangs": self._target_hangs,
        }
        if self._link is not None:
            kinds["worker cut off"] = self._worker_cut_off
            kinds["worker's link slow"] = self._worker_slow
        return _kinds(kinds, Excuse.NOTHING)

    def loud(self) -> list[Kind]:
        """Those that submit: the standby must not be promoted meanwhile."""
        return _kinds(
            {
                "long tasks": self._long_tasks,
                "flood of submissions": self._flood,
                "flood of blocked tasks": self._blocked,
                "types registered": self._types,
            },
            Excuse.NOTHING,
        )

    async def _locked(self, statement: str) -> None:
        """An open transaction, which ends without a change."""
        # The faults of the same wave may take the server away.
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            connection = await asyncpg.connect(self._scenario.deployment.postgres, timeout=5)
            try:
                await connection.execute("BEGIN")
                await connection.execute(statement, timeout=10)
                await asyncio.sleep(NEIGHBOUR_S)
            finally:
                connection.terminate()

    async def _worker_frozen(self) -> None:
        worker = self._rng.choice(self._scenario.workers_of("count"))
        with suppress(ProcessLookupError), outages.frozen(worker.pid):
            await asyncio.sleep(NEIGHBOUR_S)

    async def _worker_cut_off(self) -> None:
        assert self._link is not None
        self._link.drop(out=1.0, back=1.0)
        await asyncio.sleep(NEIGHBOUR_S)
        self._link.drop()

    async def _worker_slow(self) -> None:
        assert self._link is not None
        self._link.delay_s = 0.3
        await asyncio.sleep(NEIGHBOUR_S)
        self._link.delay_s = 0.0

    async def _target_hangs(self) -> None:
        """Ten targets of one type accept calls and do not answer."""
        targets = self._scenario.callback_targets
        await targets.behave(troubled={"kind": "hang"})
        await asyncio.sleep(NEIGHBOUR_S)
        await targets.behave(troubled={"kind": "answer"})

    def _drafts(self, name: str, count: int, **context: Any) -> list[dict[str, Any]]:
        self._count += 1
        keys = [f"{name}-{self._count}-{number}" for number in range(count)]
        type_name = bystander.TYPE if name == "long" else "flood"
        return [self._scenario.draft_of(type_name, key, **context) for key in keys]

    async def _long_tasks(self) -> None:
        """The long tasks have the bystander's own type: its short ones run where a slot is free."""
        drafts = self._drafts("long", LONG_TASKS, lasts_s=NEIGHBOUR_S)
        await self._scenario.submit_at_once(drafts, clients=1)
        running = (
            "SELECT count(*) FROM penstock.task WHERE idempotency_key LIKE 'long-%' AND finished_at IS NULL"
        )

        async def ended() -> bool:
            return await self._scenario.fetch_value(running) == 0

        await self._scenario.wait_until_true(ended, "the long tasks have ended")

    async def _flood(self) -> None:
        await self._scenario.submit_at_once(self._drafts("flood", FLOOD), clients=4)

    async def _blocked(self) -> None:
        """Tasks of one concurrency key, of which one at a time may run; then all may."""
        drafts = [{**draft, "key": "tenant"} for draft in self._drafts("blocked", FLOOD)]
        async with Client(self._scenario.deployment.gateway_url, patience_s=TIMEOUT_S) as client:
            await client.change_key("flood", "tenant", max_in_flight=1)
            try:
                await self._scenario.submit_at_once(drafts, clients=4)
                await asyncio.sleep(NEIGHBOUR_S)
            finally:
                await client.reset_key("flood", "tenant")

    async def _types(self) -> None:
        self._count += 1
        async with Client(self._scenario.deployment.gateway_url, patience_s=TIMEOUT_S) as client:
            names = [f"new-{self._count}-{number}" for number in range(NEW_TYPES)]
            await asyncio.gather(*(client.register_type(name, partitions=8) for name in names))


class Shared:
    """Faults of what all types share.

    Args:
        scenario: the running scenario.
        state: the state faults.
    """

    def __init__(self, scenario: MixedScenario, state: StateFaults) -> None:
        self._scenario = scenario
        self._rng = scenario.rng
        self._state = state

    def states(self) -> list[Kind]:
        """The state faults."""
        return [
            Kind(name, inject, Excuse.NOTHING if name in _OWN_STATE else Excuse.RETURN)
            for name, inject in self._state.kinds().items()
        ]

    def outages(self) -> list[Kind]:
        """Servers that are away, full, frozen or slow."""
        during = {
            "postgres away": outages.postgres_away,
            "postgres full": outages.postgres_full,
            "postgres frozen": outages.postgres_frozen,
            "postgres slow": outages.postgres_slow,
            "kafka away": outages.kafka_away,
            "kafka frozen": outages.kafka_frozen,
            "kafka slow": outages.kafka_slow,
            "gateway frozen": self._gateway_frozen,
        }
        away: dict[str, Callable[[], Awaitable[None]]] = {
            name: lambda outage=outage: self._away(outage) for name, outage in during.items()
        }
        # The tasks of the bystander have small contexts, which need no object store.
        objects = {"objects away": lambda: self._away(outages.objects_away)}
        return _kinds(away, Excuse.RETURN) + _kinds(objects, Excuse.NOTHING)

    def processes(self) -> list[Kind]:
        """One of two replicas of a service: frozen, and then it goes on; or killed."""
        services = ("task-sync", "heartbeats", "stages", "callbacks")
        return [
            kind
            for service in services
            for kind in (
                Kind(f"{service} frozen", lambda service=service: self._frozen(service), Excuse.TAKEOVER),
                Kind(f"{service} killed", lambda service=service: self._killed(service), Excuse.TAKEOVER),
            )
        ]

    async def _away(self, outage: Callable[[MixedScenario], Any]) -> None:
        async with outage(self._scenario):
            await asyncio.sleep(OUTAGE_S)

    @asynccontextmanager
    async def _gateway_frozen(self, scenario: MixedScenario) -> AsyncIterator[None]:
        with outages.frozen(scenario.deployment.processes["gateway"]):
            yield

    def _replica(self, service: str) -> str:
        return self._rng.choice([service, f"{service}-2"])

    async def _frozen(self, service: str) -> None:
        with outages.frozen(self._scenario.deployment.processes[self._replica(service)]):
            await asyncio.sleep(FROZEN_S)

    async def _killed(self, service: str) -> None:
        victim = self._replica(service)
        self._scenario.killed[victim] += 1
        await self._scenario.restart(victim, signal.SIGKILL)


def _kinds(injects: dict[str, Callable[[], Awaitable[None]]], excuse: Excuse) -> list[Kind]:
    return [Kind(name, inject, excuse) for name, inject in injects.items()]
