"""The workers over HTTP that this gateway has seen lately, in memory.

A worker that waits for tasks asks at least twice a minute, and one that is busy reports as often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

# A worker that has been silent for longer is not listed.
FORGET = timedelta(seconds=90)
# Most workers in memory; the one that was silent for longest is forgotten first.
MOST = 10_000
# Most types of a worker.
MOST_TYPES = 1_000


@dataclass(slots=True)
class HttpWorker:
    """A worker over HTTP.

    Attributes:
        host: its address, or that of a proxy.
        seen_at: its last request.
        types: that it has asked for, each with the moment of the last request.
    """

    host: str
    seen_at: datetime
    types: dict[str, datetime] = field(default_factory=dict)


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

    def reported(self, worker: str, now: datetime) -> None:
        """A worker has reported results or heartbeats; one that never asked is not listed."""
        if found := self._workers.pop(worker, None):
            found.seen_at = now
            self._workers[worker] = found

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
