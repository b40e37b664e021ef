"""Servers that are away, full or frozen for the time of a block."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import psutil

from penstock.local.deployment import SERVICES
from tests.chaos.scenario import Scenario

_FUNCTION = """
CREATE OR REPLACE FUNCTION public.outage() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    {body}
    RETURN NULL;
END $$
"""
_FULL = """
RAISE EXCEPTION 'could not extend file "base/5/16404": No space left on device' USING ERRCODE = '53100';
"""
_SLOW = "PERFORM pg_sleep(0.25);"
_TABLES = """
SELECT format('%I.%I', schemaname, tablename) AS name FROM pg_tables WHERE schemaname = 'penstock'
"""


@dataclass(frozen=True)
class Outage:
    """A server that is away or full.

    Attributes:
        probe: the name by which /readyz reports it.
        services: which report it.
        during: takes the server away for the time of a block.
        refuses: whether the gateway answers submissions with 503.
    """

    probe: str
    services: tuple[str, ...]
    during: Callable[[Scenario], Any]
    refuses: bool = False


@asynccontextmanager
async def postgres_away(scenario: Scenario) -> AsyncIterator[None]:
    server = scenario.database_server
    await server.stop()
    try:
        yield
    finally:
        await server.start()


@asynccontextmanager
async def postgres_full(scenario: Scenario) -> AsyncIterator[None]:
    """No table takes a row, as when its disk is full."""
    async with _before_writes(scenario, _FULL):
        yield


@asynccontextmanager
async def postgres_slow(scenario: Scenario) -> AsyncIterator[None]:
    """Each statement that writes takes a quarter of a second longer, as on a slow disk."""
    async with _before_writes(scenario, _SLOW):
        yield


@asynccontextmanager
async def _before_writes(scenario: Scenario, body: str) -> AsyncIterator[None]:
    await in_database(scenario, _FUNCTION.format(body=body))
    tables = await in_database(scenario, _TABLES)
    for table in tables:
        await in_database(
            scenario,
            f"CREATE TRIGGER outage BEFORE INSERT OR UPDATE ON {table['name']} FOR EACH STATEMENT EXECUTE FUNCTION public.outage()",
        )
    try:
        yield
    finally:
        for table in tables:
            await in_database(scenario, f"DROP TRIGGER outage ON {table['name']}")


@asynccontextmanager
async def postgres_frozen(scenario: Scenario) -> AsyncIterator[None]:
    """The server keeps its connections and answers nothing, as when its disk hangs."""
    server = psutil.Process(scenario.database_pid)
    with frozen(server.pid, *(child.pid for child in server.children())):
        yield


async def in_database(scenario: Scenario, statement: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(scenario.deployment.postgres)
    try:
        async with asyncio.timeout(30):
            if statement.strip().startswith("SELECT"):
                return await connection.fetch(statement)
            await connection.execute(statement)
            return []
    finally:
        await connection.close()


@asynccontextmanager
async def kafka_away(scenario: Scenario) -> AsyncIterator[None]:
    broker = scenario.deployment.embedded_kafka
    await broker.stop()
    try:
        yield
    finally:
        await broker.start(timeout_s=300.0)


@asynccontextmanager
async def kafka_frozen(scenario: Scenario) -> AsyncIterator[None]:
    """The broker keeps its connections and answers nothing, as when its disk hangs."""
    scenario.kill("kafka", signal.SIGSTOP)
    try:
        yield
    finally:
        scenario.kill("kafka", signal.SIGCONT)


@asynccontextmanager
async def kafka_slow(scenario: Scenario) -> AsyncIterator[None]:
    """The broker runs for 50 ms and stands for 250 ms, again and again."""
    pid = scenario.deployment.processes["kafka"]

    async def stutter() -> None:
        while True:
            with frozen(pid):
                await asyncio.sleep(0.25)
            await asyncio.sleep(0.05)

    stuttering = asyncio.create_task(stutter())
    try:
        yield
    finally:
        stuttering.cancel()
        await asyncio.wait([stuttering])


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Stops processes (SIGSTOP) for the time of a block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            # A process that was killed meanwhile is gone.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def objects_away(scenario: Scenario) -> AsyncIterator[None]:
    folder = Path(unquote(urlsplit(scenario.deployment.addresses.objects).path))
    away = folder.with_name("objects-away")
    folder.rename(away)
    folder.write_text("a file where the folder was")
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


OUTAGES = {
    "postgres away": Outage("postgres", tuple(SERVICES), postgres_away, refuses=True),
    # A service learns of it when it writes: the gateway for a submission, stages for its results.
    "postgres full": Outage("postgres", ("gateway", "stages"), postgres_full, refuses=True),
    "kafka away": Outage("kafka", tuple(SERVICES), kafka_away),
    "kafka frozen": Outage("kafka", tuple(SERVICES), kafka_frozen),
    "objects away": Outage("objects", ("gateway", "task-sync"), objects_away),
}
