"""The setup of the load tests: a process of targets, a process of the callbacks service, and a
paced load.

Latency is the time from passing a callback's record to the producer until its call arrives. Both
processes read the same monotonic clock. Rows are committed beforehand: another service does that
in production, and here it would use a share of two cores.
"""

from __future__ import annotations

import asyncio
import itertools
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
from benchmarks.measurements import percentile

from penstock.contracts.event import Callback
from penstock.kafka.processing.outbox import send_callbacks
from penstock.kafka.topology.topics import CALLBACKS
from tests.support.callback_targets import Bench, make_callback
from tests.support.waiting import wait_until

LONG = bool(os.environ.get("PENSTOCK_LOAD_LONG"))
# Records are written this often while a load is paced, in seconds.
TICK_S = 0.02
# For URLs that no other callback has.
_NUMBERS = itertools.count()
# Rows of one commit, and the seconds until the service may publish their callbacks again.
ROWS, HORIZON_S = 2000, 900.0


@dataclass
class Targets:
    """The process of the targets, and the calls it has received.

    Attributes:
        url: base URL of the targets.
        process: the process, which tests pause and resume.
        session: for requests to the process.
        calls: (arrival, webhook-id) by path, in the order of arrival.
        in_flight: number of calls in flight by group.
        seen: every webhook-id that has arrived.
    """

    url: str
    process: psutil.Process
    session: aiohttp.ClientSession
    calls: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))
    in_flight: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def urls(self, group: str, count: int, hosts: int = 1) -> list[str]:
        """The targets of a group, on so many addresses in turn."""
        port = self.url.rpartition(":")[2]
        return [f"http://127.0.0.{1 + number % hosts}:{port}/{group}/{number}" for number in range(count)]

    async def behave(self, **behaviours: dict[str, Any]) -> None:
        """Sets the behaviour of groups; see `benchmarks.targets.Behaviour`."""
        async with self.session.post(f"{self.url}/_/behaviour", data=orjson.dumps(behaviours)) as response:
            await response.read()

    async def collect(self) -> None:
        """Fetches the calls since the last `collect`."""
        async with self.session.get(f"{self.url}/_/calls") as response:
            calls = orjson.loads(await response.read())
        for path, name, at_s in calls["calls"]:
            self.calls[path].append((at_s, name))
            self.seen.add(name)
        self.in_flight = calls["in_flight"]

    def calls_of(self, group: str) -> list[tuple[float, str]]:
        """All calls to the paths of a group, by arrival."""
        return sorted(
            call for path, calls in self.calls.items() if path.startswith(f"/{group}/") for call in calls
        )

    def ids(self) -> list[str]:
        return [name for calls in self.calls.values() for _at_s, name in calls]


@asynccontextmanager
async def targets_process(folder: Path) -> AsyncIterator[Targets]:
    url_file = folder / "targets"
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.targets", str(url_file))
    try:
        await wait_until(url_file.exists, what="targets")
        async with aiohttp.ClientSession() as session:
            yield Targets(url_file.read_text(), psutil.Process(process.pid), session)
    finally:
        process.kill()
        await process.wait()


@dataclass(frozen=True)
class Stream:
    """Callbacks at a constant rate for each target, with the targets offset evenly.

    Attributes:
        urls: the targets.
        rate: callbacks per second for each target.
        unique: whether each callback has a URL of its own, which differs in its query.
    """

    urls: Sequence[str]
    rate: float
    unique: bool = False

    def schedule(self, seconds: float) -> Iterable[tuple[float, str]]:
        for at, url in enumerate(self.urls):
            phase_s = at / len(self.urls) / self.rate
            for number in range(int(seconds * self.rate)):
                query = f"?n={next(_NUMBERS)}" if self.unique else ""
                yield phase_s + number / self.rate, url + query


@dataclass
class Load:
    """Enqueued callbacks, with the time of their records.

    Attributes:
        bench: the broker and the database.
        written_s: when the record was written, by callback id.
        url: the target by callback id.
        behind_s: the longest delay of the load behind its schedule, in seconds.
    """

    bench: Bench
    written_s: dict[str, float] = field(default_factory=dict)
    url: dict[str, str] = field(default_factory=dict)
    behind_s: float = 0.0
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    def make(self, url: str, **fields: Any) -> Callback:
        callback = make_callback(url, len(self.url) + 1, **fields)
        self.url[callback.id] = url
        return callback

    async def commit(self, callbacks: Sequence[Callback]) -> None:
        """Commits the rows of callbacks."""
        for at in range(0, len(callbacks), ROWS):
            await self.bench.enqueue(*callbacks[at : at + ROWS], publish=False, due_in_s=HORIZON_S)

    async def enqueue_and_write(self, callbacks: Sequence[Callback]) -> None:
        """Commits the rows of callbacks and writes their records."""
        await self.commit(callbacks)
        self.write(callbacks)

    def write(self, callbacks: Sequence[Callback]) -> None:
        """Writes the records of committed callbacks without waiting for the broker."""
        now_s = time.monotonic()
        self.written_s.update((callback.id, now_s) for callback in callbacks)
        task = asyncio.create_task(self._send(callbacks))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, callbacks: Sequence[Callback]) -> None:
        topic = self.bench.kafka.prefix + CALLBACKS.name
        await send_callbacks(self.bench.producer, topic, callbacks)

    async def pace(self, seconds: float, *streams: Stream) -> set[str]:
        """Enqueues the callbacks of the streams on schedule; returns the ids."""
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
        """Splits callbacks into those of the first and of the second half of their period."""
        at_s = [self.written_s[name] for name in ids]
        middle_s = (min(at_s) + max(at_s)) / 2
        first = {name for name in ids if self.written_s[name] <= middle_s}
        return first, ids - first

    def latencies(self, targets: Targets, ids: set[str]) -> list[float]:
        """Seconds from the record to the first arrival, for each of `ids` that has arrived."""
        first: dict[str, float] = {}
        for calls in targets.calls.values():
            for at_s, name in calls:
                if name in ids:
                    first.setdefault(name, at_s)
        return [at_s - self.written_s[name] for name, at_s in first.items()]


def p99(seconds: list[float]) -> float:
    """The 99th percentile in milliseconds."""
    return round(percentile(seconds, 0.99) * 1000, 1)


async def arrived(targets: Targets, ids: set[str]) -> bool:
    """Whether each callback has arrived at its target."""
    await targets.collect()
    return ids <= targets.seen


async def states_of(bench: Bench, group: str) -> dict[str, str]:
    """The states of the targets of a group, by URL."""
    rows = await bench.connection.fetch(
        "SELECT url, state FROM callback_target WHERE url LIKE $1", f"%/{group}/%"
    )
    return {row["url"]: row["state"] for row in rows}


def slowdown(during_fault: Sequence[list[float]], alone: Sequence[list[float]]) -> str:
    """Describes a slowdown during a fault; "" if the p99 exceeds the usual one by at most a
    tenth or 20 ms.

    It compares the medians over the rounds, since load of the machine may affect one round.
    Latencies vary more on a machine that runs other tests. So the short form tolerates a second,
    which still detects calls that wait for unresponsive targets.
    """
    found_ms, usual_ms = median(map(p99, during_fault)), median(map(p99, alone))
    limit_ms = max(1.1 * usual_ms, usual_ms + (20 if LONG else 1000))
    return (
        "" if found_ms <= limit_ms else f"p99 is {found_ms:g} ms, {usual_ms:g} alone: more than {limit_ms:g}"
    )
