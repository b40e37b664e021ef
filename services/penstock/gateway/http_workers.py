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

from penstock.contracts.ready import ReadyTask
from penstock.contracts.worker_status import MOST_ATTEMPTS
from penstock.core.attempt import AttemptId
from penstock.core.worker_list import MISSED, OfType, WorkerStatus

# Seconds between two requests of a worker, with room for a slow network.
INTERVAL_S = 45.0
# A worker that has been silent for longer is not listed.
FORGET = timedelta(seconds=MISSED * INTERVAL_S)
# Most workers in memory; the one that was silent for longest is forgotten first.
MOST = 10_000
# Most types of a worker.
MOST_TYPES = 1_000
# Most attempts that are counted of a worker.
MOST_IN_FLIGHT = 1_000


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    """An attempt that a worker has taken from this gateway.

    Attributes:
        type_name: its type.
        until: end of its lease. Its result may have reached another gateway.
    """

    type_name: str
    until: datetime


@dataclass(slots=True)
class HttpWorker:
    """A worker over HTTP.

    Attributes:
        host: its address, or that of a proxy.
        seen_at: its last request.
        types: that it has asked for, each with the moment of the last request.
        attempts: that it has in flight.
    """

    host: str
    seen_at: datetime
    types: dict[str, datetime] = field(default_factory=dict)
    attempts: dict[AttemptId, HeldAttempt] = field(default_factory=dict)

    def status(self, worker: str, now: datetime) -> WorkerStatus:
        """The worker as records describe it; forgets attempts whose leases are over."""
        for attempt_id in [each for each, held in self.attempts.items() if held.until < now]:
            del self.attempts[attempt_id]
        counts = Counter(held.type_name for held in self.attempts.values())
        first: defaultdict[str, list[AttemptId]] = defaultdict(list)
        for attempt_id, held in islice(self.attempts.items(), MOST_ATTEMPTS):
            first[held.type_name].append(attempt_id)
        return WorkerStatus(
            id=worker,
            kind="http",
            host=self.host,
            interval_s=INTERVAL_S,
            types={
                name: OfType(in_flight=counts[name], attempts=first[name])
                for name in sorted({*self.types, *counts})
            },
            silent_ms=max(0, round((now - self.seen_at).total_seconds() * 1000)),
        )


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

    def asked(self, worker: str, type_name: str, host: str, now: datetime) -> None:
        """A worker has asked for tasks of a type."""
        found = self._workers.pop(worker, None) or HttpWorker(host, now)
        found.host, found.seen_at = host, now
        found.types[type_name] = now
        if len(found.types) > self._most_types:
            del found.types[min(found.types, key=lambda name: found.types[name])]
        self._workers[worker] = found
        if len(self._workers) > self._most:
            self._workers.popitem(last=False)

    def took(self, worker: str, tasks: Iterable[ReadyTask], now: datetime) -> None:
        """A worker that has asked has received tasks."""
        found = self._workers.get(worker)
        if found is None:
            return
        for task in tasks:
            until = now + timedelta(milliseconds=task.lease_ms)
            found.attempts[task.fence.attempt_id] = HeldAttempt(task.type, until)
        for attempt_id in list(islice(found.attempts, max(0, len(found.attempts) - MOST_IN_FLIGHT))):
            del found.attempts[attempt_id]

    def reported(
        self,
        worker: str,
        now: datetime,
        *,
        beats: Mapping[AttemptId, int] = MappingProxyType({}),
        ended: Iterable[AttemptId] = (),
    ) -> None:
        """A worker has reported results or heartbeats; one that never asked is not listed.

        Args:
            worker: its id.
            now: the moment.
            beats: the attempts of heartbeats, with the lengths of their leases in milliseconds.
            ended: the attempts of results.
        """
        if found := self._workers.pop(worker, None):
            found.seen_at = now
            self._workers[worker] = found
            for attempt_id, lease_ms in beats.items():
                if held := found.attempts.get(attempt_id):
                    until = now + timedelta(milliseconds=lease_ms)
                    found.attempts[attempt_id] = HeldAttempt(held.type_name, until)
            for attempt_id in ended:
                found.attempts.pop(attempt_id, None)

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
            worker, oldest = next(iter(self._workers.items()))
            if now - oldest.seen_at <= FORGET:
                break
            del self._workers[worker]
        for worker, found in sorted(self._workers.items()):
            if type_name in found.types:
                yield worker, found
