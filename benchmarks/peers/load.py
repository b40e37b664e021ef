"""The client of a run, in a process of its own: submits tasks one by one.

    python -m benchmarks.peers.load MODULE

It reads commands from standard input, one JSON object a line, and answers each with one:

    {"do": "prepare"}                                            before the worker starts
    {"do": "open"}                                               connects
    {"do": "pace", "first": 1, "rate": 80, "seconds": 20}        at a steady rate
    {"do": "burst", "first": 1, "seconds": 20, "unfinished": 2000}   as fast as it can

`fields` of a command are added to each context. The answer has the numbers of the tasks whose
submission was acknowledged, and of those refused. A burst keeps up to 64 submissions under way and
waits while so many tasks are unfinished, by the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.peers import job
from benchmarks.peers.job import Ledger

CONCURRENT = 64
# Seconds after which a submission counts as refused. Servers are back before.
SUBMIT_S = 30.0

Submit = Callable[[dict[str, Any]], Awaitable[None]]


class Load:
    """The submissions of one command."""

    def __init__(self, submit: Submit, fields: dict[str, Any]) -> None:
        self._submit = submit
        self._fields = fields
        self.acknowledged: list[int] = []
        self.refused: list[int] = []

    async def one(self, number: int) -> None:
        """Submits a task; its latency begins now."""
        try:
            async with asyncio.timeout(SUBMIT_S):
                await self._submit(job.context(number) | self._fields)
        except Exception as error:  # noqa: BLE001 (each client raises its own while a server is away)
            print(f"refused: {error!r:.300}", file=sys.stderr)
            self.refused.append(number)
        else:
            self.acknowledged.append(number)

    async def pace(self, first: int, rate: float, seconds: float) -> None:
        """Submits at a steady rate."""
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
                group.create_task(self.one(first + number))

    async def burst(self, first: int, seconds: float, unfinished: int) -> None:
        """Submits as fast as it can."""
        ledger = Ledger(Path(os.environ[job.LEDGER]))
        ledger.read()
        before, numbers = len(ledger.ends), itertools.count(first)
        end = time.perf_counter() + seconds

        async def submit() -> None:
            while time.perf_counter() < end:
                if len(self.acknowledged) - (len(ledger.ends) - before) >= unfinished:
                    await asyncio.sleep(0.005)
                    continue
                await self.one(next(numbers))
                await asyncio.sleep(0)  # a synchronous client never waits by itself

        async def read() -> None:
            while time.perf_counter() < end:
                ledger.read()
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            for _ in range(CONCURRENT):
                group.create_task(submit())


async def serve(module: str) -> None:
    """Answers commands until the input ends."""
    peer = importlib.import_module(f"benchmarks.peers.{module}")
    loop = asyncio.get_running_loop()
    # What peers print must not be taken for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    async with contextlib.AsyncExitStack() as stack:
        submit: Submit | None = None
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            kind = command.pop("do")
            answer: dict[str, list[int]] = {}
            if kind == "prepare":
                await peer.prepare()
            elif kind == "open":
                submit = await stack.enter_async_context(peer.submitter())
            else:
                assert submit is not None, "open first"
                load = Load(submit, command.pop("fields", {}))
                await getattr(load, kind)(**command)
                answer = {"acknowledged": load.acknowledged, "refused": load.refused}
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
