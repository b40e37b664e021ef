"""One platform for all tests of this folder, on machines with a Docker engine."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers import dead_runs
from tests.containers.platform import Platform


def _no_engine() -> str | None:
    """Why containers cannot run here, or None."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for words in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"`{' '.join(words)}` says: {(done.stderr or done.stdout).strip().splitlines()[-1:]}"
    return None


def _prepared(folder: Path) -> str | None:
    """Waits for the engine of .ci/run and configures it; returns why there is none, or None."""
    while not (folder / "env").exists():
        if (folder / "failed").exists():
            return f"none could be made: {(folder / 'log').read_text()[-500:]}"
        time.sleep(1)
    for word in shlex.split((folder / "env").read_text()):
        name, given, value = word.rstrip(";").partition("=")
        if given:
            os.environ[name] = os.path.expandvars(value)
    return None


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine with compose."""
    if (folder := os.environ.get("PENSTOCK_TEST_ENGINE")) and (why := _prepared(Path(folder))):
        pytest.skip(f"needs a Docker engine with compose: {why}")
    if why := _no_engine():
        pytest.skip(f"needs a Docker engine with compose: {why}")


@pytest.fixture(scope="session")
def platform(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Everything docker-compose.yml starts, healthy, and a type `steps` with workers."""
    found = Platform(Path(tmp_path_factory.mktemp("containers")))
    patch = pytest.MonkeyPatch()
    # Clients read the API key from this variable.
    patch.setenv("PENSTOCK_API_KEY", found.secrets["PENSTOCK_API_KEY"])
    try:
        dead_runs.remove()
        found.build()
        found.compose_now("up", "--detach")
        asyncio.run(_register(found))
        yield found
    finally:
        # Also if a container did not become healthy: its log tells why.
        sys.stderr.write(found.compose_now("logs", "--timestamps", "--tail", "60", check=False).stdout)
        patch.undo()
        found.remove()


async def _register(platform: Platform) -> None:
    async with platform.client() as client:
        # A short lease, so that tasks of a killed worker continue soon.
        await client.register_type("steps", first_stage="one", lease_ms=15_000, max_losses=20)
