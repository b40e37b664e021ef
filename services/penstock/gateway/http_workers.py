"""The workers over HTTP that this gateway has seen lately, in memory.

A worker that waits for tasks asks at least twice a minute, and one that is busy reports as often.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from types import MappingProxyType
from typing import Self

from penstock.contracts.ready import ReadyTask
from penstock.contracts.worker_status import MOST_ATTEMPTS
from penstock.core.attempt import AttemptId
from penstock.core.worker_list import MISSED, OfType, WorkerStatus

# Seconds between two requests of a worker, with room for a slow network.
INTERVAL_S = 45.0
# The most that a record may say.
MAX_INTERVAL_S = 3600.0
# A worker that has been silent for longer is not listed.
FORGET = timedelta(seconds=MISSED * INTERVAL_S)
# Most workers in memory; the one that was silent for longest is forgotten first.
MOST = 10_000
# Most types of a worker.
MOST_TYPES = 1_000
# Most attempts that are counted of a worker.
MOST_IN_FLIGHT = 1_000
# Most characters in the names of its stages. Together with its types they must fit a record.
MOST_STAGE_CHARACTERS = 10_000
# The same of all workers.
MOST_CHARACTERS = 10_000_000


@dataclass(frozen=True, slots=True)
class About:
    """The description of a worker in its request for tasks.

    Attributes:
        host: name of its host, or the address of the request.
        version: its version; None when it does not say.
        stages: of the type that it asks for; None when it does not say.
    """

    host: str
    version: str | None = None
    stages: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    """An attempt that a worker has in flight.

    Attributes:
        type_name: its type.
        until: end of its lease. Its result may have reached another gateway.
    """

    type_name: str
    until: datetime

    @classmethod
    def until_lease(cls, type_name: str, now: datetime, lease_ms: int) -> Self:
        """The attempt with a lease that begins now."""
        return cls(type_name, now + timedelta(milliseconds=lease_ms))


@dataclass(slots=True)
class HttpWorker:
    """A worker over HTTP.

    Attributes:
        host: the name that it gives, or its address, or that of a proxy.
        seen_at: its last request.
        version: that it gives; None without one.
        types: that it has asked for or has attempts of, each with the moment of the last request.
        stages: that it has handlers for, by type; without the types of which it says nothing.
        attempts: that it has in flight.
    """

    host: str
    seen_at: datetime
    version: str | None = None
    types: dict[str, datetime] = field(default_factory=dict)
    stages: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attempts: dict[AttemptId, HeldAttempt] = field(default_factory=dict)

    def status(self, worker: str, now: datetime) -> WorkerStatus:
        """The worker as records describe it; forgets attempts whose leases are over."""
        for attempt_id in [each for each, held in self.attempts.items() if held.until < now]:
            del self.attempts[attempt_id]
        counts = Counter(held.type_name for held in self.attempts.values())
        # A busy worker with long leases beats less often, and counts as lost only with all of them.
        lease_s = max(
            ((held.until - self.seen_at).total_seconds() for held in self.attempts.values()), default=0.0
        )
        first: defaultdict[str, list[AttemptId]] = defaultdict(list)
        for attempt_id, held in islice(self.attempts.items(), MOST_ATTEMPTS):
            first[held.type_name].append(attempt_id)
        return WorkerStatus(
            id=worker,
            kind="http",
            host=self.host,
            interval_s=min(max(INTERVAL_S, lease_s / MISSED), MAX_INTERVAL_S),
            types={
                name: OfType(self.stages.get(name), counts[name], first[name])
                for name in sorted({*self.types, *counts})
            },
            version=self.version,
            silent_ms=max(0, round((now - self.seen_at).total_seconds() * 1000)),
        )

    def add_type(self, type_name: str, now: datetime, most: int) -> None:
        """Adds a type; forgets the one that was not asked for the longest beyond `most`."""
        self.types[type_name] = now
        if len(self.types) > most:
            oldest = min(self.types, key=lambda name: self.types[name])
            del self.types[oldest]
            self.stages.pop(oldest, None)

    @property
    def characters(self) -> int:
        """Characters in the names of its stages."""
        return sum(len(stage) for of_type in self.stages.values() for stage in of_type)

    def set_stages(self, type_name: str, stages: tuple[str, ...]) -> None:
        """Keeps the stages of a type, unless the worker has too many."""
        if self.stages.get(type_name) == stages:
            return
        self.stages.pop(type_name, None)
        if self.characters + sum(map(len, stages)) <= MOST_STAGE_CHARACTERS:
            self.stages[type_name] = stages

    def hold(self, attempts: Iterable[tuple[AttemptId, HeldAttempt]]) -> None:
        """Adds attempts in flight; forgets the oldest beyond `MOST_IN_FLIGHT`."""
        self.attempts.update(attempts)
        for attempt_id in list(islice(self.attempts, max(0, len(self.attempts) - MOST_IN_FLIGHT))):
            del self.attempts[attempt_id]


class HttpWorkers:
    """The workers by id.

    Args:
        most: workers that are kept.
        most_types: types that are kept of one worker.
    """

    def __init__(self, *, most: int = MOST, most_types: int = MOST_TYPES) -> None:
        self._most = most
        self._most_types = most_types
        self._workers: OrderedDict[str, HttpWorker] = OrderedDict()
        self._characters = 0

    def __contains__(self, worker: str) -> bool:
        return worker in self._workers

    def asked(self, worker: str, type_name: str, about: About, now: datetime) -> None:
        """A worker has asked for tasks of a type."""
        found = self._seen(worker, about.host, now)
        before = found.characters
        found.host = about.host
        found.add_type(type_name, now, self._most_types)
        # Several threads of a worker may ask, and some may say nothing.
        if about.version is not None:
            found.version = about.version
        if about.stages is not None:
            found.set_stages(type_name, about.stages)
        self._characters += found.characters - before
        while self._characters > MOST_CHARACTERS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, oldest = self._workers.popitem(last=False)
        self._characters -= oldest.characters

    def _seen(self, worker: str, host: str, now: datetime) -> HttpWorker:
        found = self._workers.pop(worker, None) or HttpWorker(host, now)
        found.seen_at = now
        self._workers[worker] = found
        if len(self._workers) > self._most:
            self._drop_oldest()
        return found

    def took(self, worker: str, tasks: Iterable[ReadyTask], now: datetime) -> None:
        """A worker that has asked has received tasks."""
        if found := self._workers.get(worker):
            found.hold(
                (task.fence.attempt_id, HeldAttempt.until_lease(task.type, now, task.lease_ms))
                for task in tasks
            )

    def reported(
        self,
        worker: str,
        now: datetime,
        *,
        beats: Mapping[AttemptId, int] = MappingProxyType({}),
        ended: Iterable[AttemptId] = (),
    ) -> None:
        """A worker has reported results or heartbeats. This adds no worker and no attempt.

        Args:
            worker: its id.
            now: the moment.
            beats: the attempts of heartbeats, with the lengths of their leases in milliseconds.
            ended: the attempts of results.
        """
        found = self._workers.get(worker)
        if found is None:
            return
        self._seen(worker, found.host, now)
        for attempt_id, lease_ms in beats.items():
            if held := found.attempts.get(attempt_id):
                found.hold([(attempt_id, HeldAttempt.until_lease(held.type_name, now, lease_ms))])
        for attempt_id in ended:
            found.attempts.pop(attempt_id, None)

    def proved(
        self,
        worker: str,
        host: str,
        now: datetime,
        *,
        beats: Mapping[AttemptId, int],
        types: Mapping[AttemptId, str],
    ) -> None:
        """Adds the attempts of heartbeats that PostgreSQL has under this worker.

        The worker has taken them from another gateway, or from this one before it began again.

        Args:
            worker: its id.
            host: the address of the request.
            now: the moment.
            beats: as of `reported`.
            types: the types of these attempts.
        """
        if not types:
            return
        found = self._seen(worker, host, now)
        before = found.characters
        for type_name in set(types.values()):
            found.add_type(type_name, now, self._most_types)
        self._characters += found.characters - before
        found.hold(
            (attempt_id, HeldAttempt.until_lease(type_name, now, beats[attempt_id]))
            for attempt_id, type_name in types.items()
        )

    def since(self, moment: datetime) -> Iterator[tuple[str, HttpWorker]]:
        """The workers that have sent a request after a moment."""
        for worker, found in reversed(self._workers.items()):
            if found.seen_at <= moment:
                return
            yield worker, found

    def of_type(self, type_name: str, now: datetime) -> Iterator[tuple[str, HttpWorker]]:
        """The workers of a type that are not silent, in the order of their ids.

        A worker that reports and asks for the type no longer is busy, so it stays listed.
        """
        while self._workers:
            oldest = next(iter(self._workers.values()))
            if now - oldest.seen_at <= FORGET:
                break
            self._drop_oldest()
        for worker, found in sorted(self._workers.items()):
            if type_name in found.types:
                yield worker, found
