"""A service that forks, in a process of its own: python -m tests.support.forking_probe VERB …

It prints a JSON document of what it has seen.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from penstock import process
from penstock.client import Client, SyncClient
from penstock.concurrency.event_loop import _PlainLoop
from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence
from penstock.core.redaction import Redactor
from penstock.http.listener import listen
from penstock.local.reaper import Reaper
from penstock.local.state import DataDir
from penstock.sockets import make_socket
from penstock.worker import Done, Task, Worker
from penstock.worker.commands import Command, _running
from penstock.worker.execution import Execution
from penstock.worker.log_buffer import LogBuffer

FORK: Any = multiprocessing.get_context("fork")
# Seconds in which a child ends.
CHILD_S = 60


def sockets() -> int:
    """How many sockets of the internet this process has."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                with socket.socket(fileno=os.dup(int(entry.name))) as found_socket:
                    found += found_socket.family == socket.AF_INET
    return found


def in_child(look: Callable[[], Any]) -> Any:
    """Returns the result of a function in a forked child, or "it hangs"."""
    receiving, sending = FORK.Pipe(duplex=False)

    def run() -> None:
        sending.send(look())

    child = FORK.Process(target=run)
    child.start()
    sending.close()
    try:
        return receiving.recv() if receiving.poll(CHILD_S) else "it hangs"
    except EOFError:
        return "it has ended"
    finally:
        child.kill()
        child.join()


def handlers() -> list[str]:
    """The handlers of signals."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    found = ["default" if signal.getsignal(each) == signal.SIG_DFL else "python" for each in numbers]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return [*found, str(signal.set_wakeup_fd(-1))]


async def signals(stopping: asyncio.Event, ready: process.Ready) -> dict[str, Any]:
    """Children end by SIGTERM, and this process goes on."""
    ready()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
    statuses = set()
    for _ in range(20):
        child = FORK.Process(target=time.sleep, args=(600,))
        child.start()
        # Often before the child runs.
        child.terminate()
        child.join(CHILD_S)
        statuses.add(child.exitcode)
        child.kill()
        child.join()
    on_thread = await asyncio.to_thread(in_child, handlers)
    # The loop would handle a signal of the descriptor now.
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    return {
        "statuses": sorted(map(str, statuses)),
        "handlers": in_child(handlers),
        "on_thread": on_thread,
        "drains": stopping.is_set(),
    }


async def connections(_stopping: asyncio.Event, ready: process.Ready) -> dict[str, Any]:
    """Children have no connections and no ports of this process, which keeps its own."""
    ready()

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="here")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    async with (
        listen(runner, "127.0.0.1", 0) as port,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=make_socket)) as session,
    ):

        async def call() -> str:
            async with session.get(f"http://127.0.0.1:{port}/") as response:
                return await response.text()

        before = await call(), sockets()
        of_child = in_child(sockets)
        after = await call(), sockets()
    await runner.cleanup()
    return {"before": before, "child": of_child, "after": after}


async def outcomes(_stopping: asyncio.Event, ready: process.Ready) -> dict[str, Any]:
    """A child whose code returns from its handler ends there."""
    ready()
    worker, statuses = Worker(kafka="nowhere:1"), []
    surrounded = []

    def fork(code: str) -> Done:
        child = os.fork()
        if child == 0:
            if code:
                sys.exit(int(code))
            return Done("child")
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return Done("parent")

    @worker.stage("t.async")
    async def awaited(task: Task) -> Done:
        return fork(task.context)

    @worker.stage("t.sync")
    def on_thread(task: Task) -> Done:
        return fork(task.context)

    registered = worker.registered
    plain = registered.execution(None, None, lambda *_: None)

    @worker.middleware
    async def around(task: Task, call_next: Any) -> Any:
        try:
            return await call_next(task)
        finally:
            surrounded.append(os.getpid())

    executions: list[Execution] = [plain, worker.registered.execution(None, None, lambda *_: None)]
    results = []
    for execution in executions:
        for stage in ("async", "sync"):
            for code in ("", "3"):
                ready_task = ReadyTask(Fence(1, 0, stage, 0), "t", Context.encode(code), lease_ms=60_000)
                result = await execution.run(ready_task, lambda _result: None)
                assert result is not None
                assert result.context is not None
                results.append(result.outcome.value)
    return {"statuses": statuses, "results": results, "process": surrounded == [os.getpid()] * 4}


def locks(folder: str) -> dict[str, Any]:
    """Children keep neither the reaper nor a data directory, and wait for no lock of a log."""
    reaper = Reaper()
    directory = DataDir(Path(folder) / "data")
    buffer = LogBuffer("w", Redactor({}), lambda _urgent: None)
    run_log = buffer.begin(AttemptId(1, 0, 0))
    _running.add(Command(["true"], None))
    released = threading.Event()
    holding = threading.Event()

    def hold() -> None:
        with buffer._lock:
            holding.set()
            released.wait()

    threading.Thread(target=hold, daemon=True).start()
    holding.wait()

    def log() -> Any:
        run_log.add(20, "stdout", "a line")
        run_log.write("stdout", "text")
        return len(_running)

    logged = in_child(log)
    released.set()
    child = FORK.Process(target=time.sleep, args=(600,))
    child.start()
    reaper._process.stdin.close()  # type: ignore[union-attr]
    try:
        reaper._process.wait(CHILD_S)
        reaped = True
    except subprocess.TimeoutExpired:
        reaped = False
    directory.close()
    DataDir(Path(folder) / "data").close()
    child.kill()
    child.join()
    return {"logged": logged, "reaped": reaped}


async def use_asynchronous(url: str) -> Any:
    """The same with a client of asyncio."""
    async with Client(url) as opened:
        before = len(await opened.types())

        def use() -> str:
            async def run() -> None:
                await opened.types()

            try:
                asyncio.run(run())
            except RuntimeError as error:
                return str(error)
            return "no error"

        return before, in_child(use), len(await opened.types())


def client(url: str) -> dict[str, Any]:
    """A client that the parent has opened, in a child."""
    with SyncClient(url) as opened:
        listed = opened.list()
        next(listed)

        def use() -> Any:
            iteration = ""
            try:
                next(listed)
            except RuntimeError as error:
                iteration = str(error)
            found: list[int] = []

            def read() -> None:
                found.append(len(opened.types()))

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            # And a child of the child.
            return found, iteration, in_child(lambda: len(opened.types()))

        of_child = in_child(use)
        after = len(opened.types()), next(listed).id

        def leave() -> str:
            opened.__exit__()
            return "left"

        left = in_child(leave)

    return {"child": of_child, "after": after, "left": left, "async": asyncio.run(use_asynchronous(url))}


def main(verb: str, *arguments: str) -> int:
    if verb in ("locks", "client"):
        found = {"locks": locks, "client": client}[verb](*arguments)
        print(json.dumps(found), flush=True)
        return 0
    work = {"signals": signals, "connections": connections, "outcomes": outcomes}[verb]
    if arguments == ("plain",):
        process.event_loop_factory = lambda: _PlainLoop

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        print(json.dumps(await work(stopping, ready)), flush=True)

    return process.run("probe", service)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
