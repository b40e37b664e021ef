"""Replicas of services in processes of their own, which a test freezes or cuts off."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.postgres import migrations
from penstock.settings import Platform
from tests.support.postgres_servers import PostgresServer

_FIELDS = ("kafka", "prefix", "postgres", "objects")


@pytest.fixture
async def linked_postgres(tmp_path: Path) -> AsyncIterator[PostgresServer]:
    """A migrated server that listens on TCP, for this machine and behind a `tests.chaos.link`."""
    server = PostgresServer(tmp_path / "postgres")
    try:
        server.make()
        with (server.data / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.251.0.0/16 scram-sha-256\n")
        await server.start()
        await migrations.migrate(server.url())
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def replica(
    service: str, settings: Platform, *command: str, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A service as a process; `command` is a command that replaces itself by it."""
    process = await asyncio.create_subprocess_exec(
        *command,
        *(sys.executable, "-m", "penstock", "run", service),
        env={**os.environ, **_variables(settings), **environment},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _variables(settings: Any) -> dict[str, str]:
    return {f"PENSTOCK_{name.upper()}": str(getattr(settings, name)) for name in _FIELDS}
