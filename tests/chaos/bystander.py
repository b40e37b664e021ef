"""A type that no fault concerns: single tasks, one after the other, and how long each takes.

A fault of a server that all types share delays the bystander, too. The time in which such a fault
lasts, and the time that its recovery may take, is excused: it does not count as delay.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import asyncpg
from benchmarks.measurements import percentile

from penstock.client import Client
from tests.chaos.scenario import SEED, TIMEOUT_S
from tests.support.waiting import wait_until

TYPE = "bystander"
PERIOD_S = 0.2
# The longest delay by the fault of another type, tenant or worker.
BOUND_S = 5.0
# Until another replica has taken over from a frozen one (docs/decisions/041).
TAKEOVER_S = 10.0
# After the return of a server that all share: workers may have lost leases and their group, join it
# again, and find an attempt that waits for its retry.
RETURN_S = 20.0

_ENDED = """
SELECT idempotency_key AS key FROM penstock.task
WHERE type = 'bystander' AND idempotency_key = ANY ($1::text[]) AND finished_at IS NOT NULL
"""


@dataclass(slots=True)
class Passage:
    """One task of the bystander; times are of the monotonic clock, in seconds.

    Attributes:
        submitted_s: when its submission began.
        ended_s: when it was seen to have ended; None before.
        called_s: when its callback arrived; None before.
    """

    submitted_s: float
    ended_s: float | None = None
    called_s: float | None = None


@dataclass(slots=True)
class Span:
    """The time of one fault.

    Attributes:
        kind: name of its kind.
        begin_s: when it began.
        over_s: when it was over.
        excused_s: until when a delay is excused; `begin_s` when nothing is.
    """

    kind: str
    begin_s: float
    over_s: float = math.inf
    excused_s: float = math.inf

    def meets(self, begin_s: float, end_s: float) -> bool:
        """Whether a task that was under way meanwhile may have met the fault or its recovery."""
        return self.begin_s < end_s and begin_s < max(self.over_s, self.excused_s)


@dataclass(frozen=True, slots=True)
class Delay:
    """How long one task took.

    Attributes:
        key: of the task.
        until_end_s: seconds from its submission to its end.
        until_called_s: seconds until its callback had arrived, too.
        counted_s: seconds of them that no fault excuses.
        kinds: the faults that it met.
    """

    key: str
    until_end_s: float
    until_called_s: float
    counted_s: float
    kinds: Sequence[str]


def delay_s(begin_s: float, end_s: float, spans: Iterable[Span]) -> float:
    """The seconds from `begin_s` to `end_s` that no span excuses."""
    counted_s, at_s = 0.0, begin_s
    for span in sorted(spans, key=lambda each: each.begin_s):
        counted_s += max(0.0, min(span.begin_s, end_s) - at_s)
        at_s = max(at_s, min(span.excused_s, end_s))
    return counted_s + max(0.0, end_s - at_s)


class Bystander:
    """Submits and watches the tasks.

    Args:
        gateway_url: where to submit.
        postgres: URL of the database.
        draft: makes a submission with a key.
        acknowledged: receives the key and the submission of each acknowledged task.
    """

    def __init__(
        self,
        gateway_url: str,
        postgres: str,
        draft: Callable[[str], dict[str, Any]],
        acknowledged: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._gateway_url = gateway_url
        self._postgres = postgres
        self._draft = draft
        self._acknowledged = acknowledged
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight = 0
        self.passages: dict[str, Passage] = {}
        self.spans: list[Span] = []
        self._left: set[str] = set()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Submits nothing for the time of the block."""
        self._open.clear()
        try:
            await wait_until(lambda: not self._in_flight, timeout=TIMEOUT_S, what="no submission in flight")
            yield
        finally:
            self._open.set()

    @asynccontextmanager
    async def passing(self, is_lost: Callable[[str], bool]) -> AsyncIterator[None]:
        """Submits and watches for the time of the block; returns when all its tasks have ended.

        Args:
            is_lost: whether a fault removed the task with a key.
        """
        ending = asyncio.Event()
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                submitting = group.create_task(self._submit_all(ending))
                try:
                    yield
                finally:
                    ending.set()
                await submitting

            def all_ended() -> bool:
                self._left -= {key for key in self._left if is_lost(key)}
                return not self._left

            await wait_until(
                all_ended, timeout=TIMEOUT_S, every=0.1, what=f"seed {SEED}: every bystander has ended"
            )
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _submit_all(self, ending: asyncio.Event) -> None:
        async with Client(self._gateway_url, patience_s=TIMEOUT_S) as client, asyncio.TaskGroup() as group:
            while not ending.is_set():
                if self._open.is_set():
                    group.create_task(self._submit(client))
                await asyncio.sleep(PERIOD_S)

    async def _submit(self, client: Client) -> None:
        key = f"{TYPE}-{len(self.passages)}"
        self.passages[key] = Passage(time.monotonic())
        draft = self._draft(key)
        self._in_flight += 1
        try:
            await client.submit_many([draft])
        finally:
            self._in_flight -= 1
        self._acknowledged(key, draft)
        self._left.add(key)

    async def _watch(self) -> None:
        while True:
            # Without an answer the next connection is tried.
            with suppress(
                OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError
            ):
                connection = await asyncpg.connect(self._postgres, timeout=5)
                try:
                    await self._watch_by(connection)
                finally:
                    connection.terminate()
            await asyncio.sleep(0.1)

    async def _watch_by(self, connection: asyncpg.Connection) -> None:
        while True:
            await asyncio.sleep(0.1)
            rows = await connection.fetch(_ENDED, list(self._left), timeout=5) if self._left else ()
            now_s = time.monotonic()
            for row in rows:
                self.passages[row["key"]].ended_s = now_s
                self._left.discard(row["key"])

    def delays(self, kind: str | None = None) -> Sequence[Delay]:
        """The delay of each task that has ended.

        Args:
            kind: only tasks that were under way in a fault of this kind, or soon after it.
        """
        spans = [span for span in self.spans if span.kind == kind]
        return [
            Delay(
                key,
                each.ended_s - each.submitted_s,
                last_s - each.submitted_s,
                delay_s(each.submitted_s, last_s, self.spans),
                [span.kind for span in self.spans if span.meets(each.submitted_s, last_s)],
            )
            for key, each in self.passages.items()
            if each.ended_s is not None
            for last_s in [max(each.ended_s, each.called_s or each.ended_s)]
            if kind is None or any(span.meets(each.submitted_s, last_s) for span in spans)
        ]

    def recovered(self) -> None:
        """Excuses nothing that is submitted from now on."""
        now_s = time.monotonic()
        for span in self.spans:
            span.excused_s = min(span.excused_s, now_s)

    def _after_s(self, kind: str | None) -> float:
        """The longest time from the end of a fault to the end of a task that was submitted before
        it was over."""
        return max(
            (
                max(each.ended_s, each.called_s or each.ended_s) - span.over_s
                for each in self.passages.values()
                if each.ended_s is not None
                for span in self.spans
                if kind in (None, span.kind)
                and span.begin_s < each.ended_s
                and each.submitted_s < span.over_s
            ),
            default=0.0,
        )

    def called(self, arrivals: Mapping[str, float]) -> None:
        """Notes when the callbacks arrived, by key."""
        for key, at_s in arrivals.items():
            self.passages[key].called_s = at_s

    def figures(self) -> list[str]:
        """The delays beside each kind, one sentence each."""
        sentences = []
        for kind in [None, *sorted({span.kind for span in self.spans})]:
            delays = self.delays(kind)
            if delays:
                took = [each.until_called_s for each in delays]
                counted = [each.counted_s for each in delays]
                sentences.append(
                    f"bystander, {kind or 'all'}: {len(delays):,} tasks, p50 {percentile(took, 0.5):.2f} s, p99 {percentile(took, 0.99):.2f} s, "
                    f"max {max(took):.2f} s; not excused: p99 {percentile(counted, 0.99):.2f} s, max {max(counted):.2f} s; "
                    f"ended at most {self._after_s(kind):.2f} s after the fault"
                )
        return sentences
