"""One run of docker-compose.yml with a unique name, and operations on it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, Self

from penstock.client import Client
from penstock.kafka.topology.services import SERVICES as PLATFORM
from tests.containers import dead_runs
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
IMAGE = Path(__file__).parent / "image"

# Containers by service: those of Penstock, and of the tests' worker.
SERVICES = (*PLATFORM, "steps")
REPLICAS = {"kafka": 1, "postgres": 1, **dict.fromkeys(SERVICES, 2), "gateway": 1, "receiver": 1}

# Far longer than any operation takes on two busy cores.
TIMEOUT_S = 600


def free_port() -> int:
    """Finds a free port. The engine cannot choose it, since it must not change when a container
    is recreated."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Platform:
    """Containers, networks, volumes and images with the name of this run, which `remove` removes.

    Args:
        folder: folder of its .env file.
    """

    def __init__(self, folder: Path) -> None:
        self.name = dead_runs.name_of_run(secrets.token_hex(4))
        self.gateway_url = f"http://127.0.0.1:{(port := free_port())}"
        self.receiver_port = free_port()
        self.images = {
            kind: f"{self.name}-{kind}:test" for kind in ("services", "worker", "media", "steps", "receiver")
        }
        self._env_file = folder / ".env"
        subprocess.run(
            [sys.executable, ROOT / "infra/make_env.py", ROOT / ".env.example", self._env_file],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.secrets = dict(
            line.split("=", 1) for line in self._env_file.read_text().splitlines() if line[:1].isalpha()
        )
        self._environment = {
            # Variables of this process would override the file.
            **{name: value for name, value in os.environ.items() if name not in self.secrets},
            "PENSTOCK_IMAGE": self.images["services"],
            "PENSTOCK_MEDIA_IMAGE": self.images["media"],
            "PENSTOCK_PUBLISH": f"127.0.0.1:{port}",
            # The target is in the network `edge`, whose addresses the engine chooses.
            "PENSTOCK_CALLBACK_ALLOW": "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16",
            "TEST_STEPS": self.images["steps"],
            "TEST_RECEIVER": self.images["receiver"],
            "TEST_RECEIVER_PORT": str(self.receiver_port),
        }

    def docker_now(
        self, *words: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs `docker …` to its end.

        Raises:
            AssertionError: the command failed; the message has its output.
        """
        done = subprocess.run(
            ["docker", *words],
            input=stdin,
            capture_output=True,
            text=True,
            env=self._environment,
            cwd=ROOT,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"docker {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def compose_now(
        self, *words: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs `docker compose …` with the files and the name of this run."""
        files = ("-f", "docker-compose.yml", "-f", "tests/containers/compose.yml")
        return self.docker_now(
            "compose",
            "--env-file",
            str(self._env_file),
            "-p",
            self.name,
            *files,
            *words,
            stdin=stdin,
            check=check,
        )

    async def docker(self, *words: str, **options: Any) -> str:
        """Runs `docker_now` in a thread; returns the output."""
        return (await asyncio.to_thread(self.docker_now, *words, **options)).stdout

    async def compose(self, *words: str, **options: Any) -> str:
        """Runs `compose_now` in a thread; returns the output."""
        return (await asyncio.to_thread(self.compose_now, *words, **options)).stdout

    def build(self) -> None:
        """Builds every image, as a user would: the platform's by compose, the others by the
        Dockerfiles."""
        self.compose_now("build", "migrate")
        self.docker_now(
            "build", "-f", "infra/Dockerfile", "--target", "worker", "-t", self.images["worker"], "."
        )
        bases = (f"SERVICES={self.images['services']}", f"WORKER={self.images['worker']}")
        for target in ("steps", "receiver"):
            arguments = [word for base in bases for word in ("--build-arg", base)]
            self.docker_now("build", "--target", target, *arguments, "-t", self.images[target], str(IMAGE))

    def remove(self) -> None:
        """Removes everything, also remains of an interrupted `docker compose`."""
        name_filter = f"label=com.docker.compose.project={self.name}"
        if found := self.docker_now(
            "ps", "--all", "--quiet", "--filter", name_filter, check=False
        ).stdout.split():
            self.docker_now("rm", "--force", "--volumes", *found, check=False)
        self.compose_now("--profile", "*", "down", "--volumes", "--timeout", "5", check=False)
        self.docker_now("rmi", *self.images.values(), check=False)

    def client(self) -> Client:
        """A client that waits for a gateway while it is recreated."""
        return Client(self.gateway_url, patience_s=TIMEOUT_S)

    async def containers(self, service: str) -> list[str]:
        """The ids of a service's containers, running or not."""
        return (await self.compose("ps", "--all", "--quiet", service)).split()

    async def running(self) -> dict[str, Counter[str]]:
        """Counts containers by service and health; by state if they do not run."""
        found: dict[str, Counter[str]] = {}
        for line in (await self.compose("ps", "--all", "--format", "json")).splitlines():
            entry = json.loads(line)
            found.setdefault(entry["Service"], Counter())[entry["Health"] or entry["State"]] += 1
        return found

    async def wait_healthy(self, **more: int) -> None:
        """Waits until every container is healthy. An answer of compose takes a second of CPU."""
        wanted = {service: {"healthy": count} for service, count in {**REPLICAS, **more}.items()}

        async def all_healthy() -> bool:
            found = await self.running()
            return all(found.get(service) == state for service, state in wanted.items())

        await wait_until(all_healthy, timeout=TIMEOUT_S, every=3.0, what=f"healthy: {wanted}")

    async def received(self) -> dict[int, str]:
        """The state in the callback of each task that the target has received."""

        def ask() -> dict[str, str]:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.receiver_port}/received", timeout=10
            ) as answer:
                found: dict[str, str] = json.load(answer)
                return found

        return {int(number): state for number, state in (await asyncio.to_thread(ask)).items()}

    async def check(self) -> None:
        """Runs `penstock check` in a container, which must be clean."""
        assert "clean: nothing is in limbo" in await self.compose("run", "--rm", "cli", "check")


class Load:
    """Submits tasks over HTTP, a few at a time, for the duration of the block.

    At the end of the block every acknowledged task has succeeded, and its callback has arrived.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._stopping = asyncio.Event()
        self._run = secrets.token_hex(4)
        self.acknowledged: list[int] = []

    async def __aenter__(self) -> Self:
        self._client = await self._platform.client().__aenter__()
        self._submitting = asyncio.create_task(self._submit())
        await self.progress(5)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping.set()
        try:
            if kind is not None:
                self._submitting.cancel()
                await asyncio.wait([self._submitting])
                return
            await self._submitting
            await self.settled(self.acknowledged)
        finally:
            await self._client.__aexit__(None, None, None)

    async def _submit(self) -> None:
        number = 0
        while not self._stopping.is_set():
            drafts = [draft(f"{self._run}-{number}-{entry}") for entry in range(3)]
            self.acknowledged += [task.id for task in await self._client.submit_many(drafts)]
            number += 1
            # Waits between submissions, but not after the end of the block.
            await asyncio.wait([asyncio.ensure_future(self._stopping.wait())], timeout=0.5)

    async def progress(self, count: int = 12) -> None:
        """Waits until `count` further tasks have succeeded and their callbacks have arrived."""
        before = len(self.acknowledged)
        await wait_until(
            lambda: self._submitting.done() or len(self.acknowledged) >= before + count,
            timeout=TIMEOUT_S,
            what=f"{count} more tasks are acknowledged",
        )
        if self._submitting.done():
            self._submitting.result()
        await self.settled(self.acknowledged[before : before + count])

    async def settled(self, ids: list[int]) -> None:
        """Waits until these tasks have succeeded and their callbacks have arrived."""
        states = await self._client.wait(ids, timeout_s=TIMEOUT_S)
        assert states == {"succeeded": len(ids)}

        async def missing() -> set[int]:
            received = await self._platform.received()
            return {number for number in ids if received.get(number) != "succeeded"}

        async def all_received() -> bool:
            return not await missing()

        began = time.monotonic()
        try:
            await wait_until(all_received, timeout=TIMEOUT_S, every=0.2)
        except TimeoutError as error:
            raise AssertionError(
                f"no callback for {sorted(await missing())} of {len(ids)} tasks after {time.monotonic() - began:.0f} s"
            ) from error


def draft(key: str) -> dict[str, Any]:
    """A task of three stages with a callback, in the format of `submitted.schema.json`."""
    return {
        "type": "steps",
        "context": {"key": key},
        "idempotency_key": key,
        "callbacks": ["http://receiver:9000/hooks"],
    }
