"""The disk of the object store, and then that of PostgreSQL, is really full, and is freed later."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.chaos.outage_wave import LEASE_MS, OutageScenario, metered, nothing_charged, wave_through
from tests.chaos.scenario import run_scenario
from tests.support.callback_targets import target_server
from tests.support.postgres_servers import PostgresServer

_MIB = 2**20


@cache
def missing() -> str | None:
    """Why this machine cannot mount a small disk; None when a trial succeeds."""
    with TemporaryDirectory() as folder:
        try:
            with disk(Path(folder) / "disk", 1):
                return None
        except (OSError, subprocess.CalledProcessError) as error:
            return f"mounting a small disk failed: {getattr(error, 'stderr', None) or error}"


@contextmanager
def disk(folder: Path, mib: int) -> Iterator[Path]:
    """A disk of so many MiB, in memory."""
    folder.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        # The servers on it have ended, or it is removed once they have.
        _run("umount", "--lazy", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@asynccontextmanager
async def filled(folder: Path) -> AsyncIterator[None]:
    """No byte is free on a disk for the time of a block."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), bytes(_MIB))
        except OSError:
            pass
        while True:
            try:
                os.write(file.fileno(), bytes(512))
            except OSError:
                break
    try:
        yield
    finally:
        ballast.unlink()


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_a_full_disk_is_charged_to_no_attempt(tmp_path):
    """S11, T4, O2: the folder of the object store has no room; then PostgreSQL's disk has none, and
    the server may end for it. The services that write report it, none ends, and everything goes on
    by itself when there is room again."""
    with disk(tmp_path / "objects", 64) as objects, disk(tmp_path / "database", 400) as folder:
        server = PostgresServer(folder / "postgres")
        server.make()
        small = {"min_wal_size": "32MB", "max_wal_size": "64MB"}
        await server.start(**small)

        @asynccontextmanager
        async def database_full() -> AsyncIterator[None]:
            async with filled(folder):
                yield
            if not await server.serves():
                # It has ended at a log without room, and its operator starts it again.
                server.kill()
                await server.start(**small)

        try:
            async with (
                target_server() as target,
                run_scenario(
                    tmp_path,
                    "full disks",
                    workers=1,
                    environment={**metered(), "PENSTOCK_CALLBACK_ALLOW": "127.0.0.0/8"},
                    lease_ms=LEASE_MS,
                    postgres=server.url(),
                    objects=objects.as_uri(),
                    kind=OutageScenario,
                ) as scenario,
            ):
                scenario.start_with(target)
                for check, outage in (("objects", partial(filled, objects)), ("postgres", database_full)):
                    reports = dict.fromkeys(("gateway", "task-sync"), frozenset({check}))
                    async with nothing_charged(scenario, target):
                        await wave_through(scenario, f"{check} full", outage, reports)
        finally:
            server.kill()
