"""The stage of the load tests: targets as a process of their own, the callbacks service as another, and a load at a pace.

Latency is from the moment a callback's record is handed to the producer to the arrival of its call: both processes read the same
monotonic clock. The rows are there before: to commit them is another service's work, and would take its share of two cores here.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson
import psutil
from benchmarks.figures import percentile

from penstock.contracts.event import Callback
from penstock.kafka.outbox import send_callbacks
from penstock.kafka.topics import CALLBACKS
from tests.callback_targets import Bench, owed
from tests.waiting import wait_until

LONG = bool(os.environ.get("PENSTOCK_LOAD_LONG"))
# Records are written this often while a load is paced, in seconds.
TICK_S = 0.02
# Rows are committed so many at a time, and nobody looks for their callbacks before so many seconds have passed.
ROWS, HORIZON_S = 2000, 900.0


@dataclass
class Targets:
    """The targets' process, and what it has told so far.

    Attributes:
        url: where it listens.
        process: to be stopped and continued.
        calls: (arrival, webhook-id) by path, in the order of arrival.
        broken: (webhook-id, arrival, end) by path, of calls that the service broke off.
        seen: every webhook-id that has come.
    """

    url: str
    process: psutil.Process
    session: aiohttp.ClientSession
    calls: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))
    broken: dict[str, list[tuple[str, float, float]]] = field(default_factory=lambda: defaultdict(list))
    under_way: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def urls(self, group: str, count: int) -> list[str]:
        return [f"{self.url}/{group}/{number}" for number in range(count)]

    async def behave(self, **manners: dict[str, Any]) -> None:
        """Sets the manners of groups; see `benchmarks.targets.Manners`."""
        async with self.session.post(f"{self.url}/_/manners", data=orjson.dumps(manners)) as response:
            await response.read()

    async def collect(self) -> None:
        """Fetches what has come since."""
        async with self.session.get(f"{self.url}/_/calls") as response:
            told = orjson.loads(await response.read())
        for path, name, at_s in told["calls"]:
            self.calls[path].append((at_s, name))
            self.seen.add(name)
        for path, name, at_s, end_s in told["broken"]:
            self.broken[path].append((name, at_s, end_s))
        self.under_way = told["under_way"]

    def of(self, group: str) -> list[tuple[float, str]]:
        """All calls of a group's paths, by arrival."""
        return sorted(
            call for path, calls in self.calls.items() if path.startswith(f"/{group}/") for call in calls
        )

    def ids(self) -> list[str]:
        return [name for calls in self.calls.values() for _at_s, name in calls]


@asynccontextmanager
async def targets_process(folder: Path) -> AsyncIterator[Targets]:
    mark = folder / "targets"
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.targets", str(mark))
    try:
        await wait_until(mark.exists, what="targets")
        async with aiohttp.ClientSession() as session:
            yield Targets(mark.read_text(), psutil.Process(process.pid), session)
    finally:
        process.kill()
        await process.wait()


@dataclass(frozen=True)
class Stream:
    """Callbacks to some targets, each at a steady pace, the targets spread evenly.

    Attributes:
        urls: the targets.
        rate: callbacks a second for each of them.
    """

    urls: Sequence[str]
    rate: float

    def schedule(self, seconds: float) -> Iterable[tuple[float, str]]:
        for at, url in enumerate(self.urls):
            phase_s = at / len(self.urls) / self.rate
            for number in range(int(seconds * self.rate)):
                yield phase_s + number / self.rate, url


@dataclass
class Load:
    """What is owed, and since when.

    Attributes:
        bench: where.
        owed_s: the moment that its record was written, by callback id.
        url: the target by callback id.
        behind_s: by how much the load was late at worst.
    """

    bench: Bench
    owed_s: dict[str, float] = field(default_factory=dict)
    url: dict[str, str] = field(default_factory=dict)
    behind_s: float = 0.0
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    def make(self, url: str, **fields: Any) -> Callback:
        callback = owed(url, len(self.url) + 1, **fields)
        self.url[callback.id] = url
        return callback

    async def commit(self, callbacks: Sequence[Callback]) -> None:
        """Commits their rows."""
        for at in range(0, len(callbacks), ROWS):
            await self.bench.owe(*callbacks[at : at + ROWS], publish=False, due_in_s=HORIZON_S)

    async def owe(self, callbacks: Sequence[Callback]) -> None:
        """Commits their rows and writes their records."""
        await self.commit(callbacks)
        self.write(callbacks)

    def write(self, callbacks: Sequence[Callback]) -> None:
        """Writes the records of what is committed, and does not wait for the broker."""
        now_s = time.monotonic()
        self.owed_s.update((callback.id, now_s) for callback in callbacks)
        task = asyncio.create_task(self._send(callbacks))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, callbacks: Sequence[Callback]) -> None:
        topic = self.bench.kafka.prefix + CALLBACKS.name
        await send_callbacks(self.bench.producer, topic, callbacks)

    async def pace(self, seconds: float, *streams: Stream) -> set[str]:
        """Owes what the streams say, when they say so; returns the ids."""
        schedule = sorted(one for stream in streams for one in stream.schedule(seconds))
        callbacks = [self.make(url) for _at_s, url in schedule]
        await self.commit(callbacks)
        begin_s, at = time.monotonic(), 0
        while at < len(schedule):
            passed_s, first = time.monotonic() - begin_s, at
            while at < len(schedule) and schedule[at][0] <= passed_s:
                at += 1
            if at > first:
                self.behind_s = max(self.behind_s, passed_s - schedule[first][0])
                self.write(callbacks[first:at])
            await asyncio.sleep(TICK_S)
        if self._sending:
            await asyncio.gather(*self._sending)
        return {callback.id for callback in callbacks}

    def halves(self, ids: set[str]) -> tuple[set[str], set[str]]:
        """Those of the first half of their time, and the others."""
        at_s = [self.owed_s[name] for name in ids]
        middle_s = (min(at_s) + max(at_s)) / 2
        first = {name for name in ids if self.owed_s[name] <= middle_s}
        return first, ids - first

    def latencies(self, targets: Targets, ids: set[str]) -> list[float]:
        """Seconds from its record to the first arrival, for those of `ids` that have arrived."""
        first: dict[str, float] = {}
        for calls in targets.calls.values():
            for at_s, name in calls:
                if name in ids:
                    first.setdefault(name, at_s)
        return [at_s - self.owed_s[name] for name, at_s in first.items()]


def p99(seconds: list[float]) -> float:
    """In milliseconds."""
    return round(percentile(seconds, 0.99) * 1000, 1)


def median_of(seconds: list[float]) -> float:
    """In milliseconds."""
    return round(percentile(seconds, 0.5) * 1000, 1)


async def arrived(targets: Targets, ids: set[str]) -> bool:
    """Whether each of the ids has come to its target."""
    await targets.collect()
    return ids <= targets.seen


async def states_of(bench: Bench, group: str) -> dict[str, str]:
    """State by URL of a group's targets."""
    rows = await bench.connection.fetch(
        "SELECT url, state FROM callback_target WHERE url LIKE $1", f"%/{group}/%"
    )
    return {row["url"]: row["state"] for row in rows}


def rss_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def felt(beside: Sequence[list[float]], alone: Sequence[list[float]]) -> str:
    """What is wrong with the latencies beside a fault, as words; nothing when their p99 is within a tenth, or 20 ms, of the others'.

    The median of each one's rounds is compared: one of them may have met a moment of the machine's own. A machine that runs
    other tests besides differs by more from one second to the next, so the short form asks only whether others wait for what
    hangs (seconds), or not.
    """
    found_ms, usual_ms = median(map(p99, beside)), median(map(p99, alone))
    most_ms = max(1.1 * usual_ms, usual_ms + (20 if LONG else 1000))
    return "" if found_ms <= most_ms else f"p99 is {found_ms:g} ms, {usual_ms:g} alone: more than {most_ms:g}"
