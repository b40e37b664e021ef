"""One Kafka broker and one PostgreSQL server for all processes of a test run.

The process that the user starts runs the servers. The processes that pytest-xdist starts find
them by their environment variables, which are also the way to use servers that run already.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock
from urllib.parse import urlsplit

import asyncpg

from penstock.local import database
from penstock.local.broker import EmbeddedKafka, Node
from penstock.local.database import EmbeddedPostgres
from penstock.local.supervisor import Supervisor
from penstock.postgres.migrations import migrate
from tests.support.memory_folder import make_folder

T = TypeVar("T")

KAFKA = "PENSTOCK_TEST_KAFKA"
POSTGRES = "PENSTOCK_TEST_POSTGRES"
TEMPLATE = "PENSTOCK_TEST_TEMPLATE"

# One broker serves several processes. It removes the files of deleted topics at once, because
# there are thousands.
_BROKER = Node(heap_mb=1024, properties={"log.segment.delete.delay.ms": "1000", "num.io.threads": "8"})
# Tests of durability start servers of their own.
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off", "max_connections": "600"}


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in a thread of its own, outside every test's event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def database_dsn(server: str, name: str) -> str:
    """The URL of database `name` on the server of another URL."""
    return urlsplit(server)._replace(path=f"/{name}").geturl()


async def execute(dsn: str, statement: str) -> None:
    """Runs one statement on a connection of its own."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def make_template(server: str) -> str:
    """Makes a database with all migrations applied, and returns its name."""
    name = f"template_{os.urandom(5).hex()}"
    await execute(server, f"CREATE DATABASE {name}")
    await migrate(database_dsn(server, name))
    return name


class SharedServers:
    """The servers of one run; `close` ends them, and the supervisor's reaper ends them after a
    crash."""

    def __init__(self) -> None:
        self.folder = make_folder("penstock-tests-")
        self._log = (self.folder / "servers.log").open("w", buffering=1, encoding="utf-8")
        self.supervisor = Supervisor(self._write_line, run_dir=self.folder / "run")

    def _write_line(self, name: str, line: str) -> None:
        self._log.write(f"{name} {line}\n")

    def start_all(self) -> dict[str, str]:
        """Starts both servers side by side; returns the environment variables that lead to them."""

        async def both() -> tuple[str, str]:
            return await asyncio.gather(self._kafka(), self._postgres())

        kafka, postgres = run(both())
        return {KAFKA: kafka, POSTGRES: postgres, TEMPLATE: run(make_template(postgres))}

    def start_kafka(self) -> str:
        """Starts the broker; returns its bootstrap servers."""
        return run(self._kafka())

    def start_postgres(self) -> str:
        """Starts PostgreSQL; returns the URL of its database `postgres`."""
        return run(self._postgres())

    async def _kafka(self) -> str:
        broker = EmbeddedKafka(self.supervisor, self.folder / "kafka", node=_BROKER)
        await broker.start(timeout_s=300.0)
        return broker.servers

    async def _postgres(self) -> str:
        server = EmbeddedPostgres(self.supervisor, self.folder / "postgres")
        with mock.patch.dict(database._SETTINGS, _NOT_DURABLE):
            await server.start()
        return server.dsn()

    def log_lines(self, count: int = 40) -> str:
        """The last lines that the servers have logged."""
        return "".join(
            (self.folder / "servers.log").read_text(encoding="utf-8").splitlines(keepends=True)[-count:]
        )

    def close(self) -> None:
        """Ends the servers and removes their data."""
        self.supervisor.close()
        self._log.close()
        shutil.rmtree(self.folder)
