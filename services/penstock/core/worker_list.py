"""The workers that run, and those that are lost, by the records that they write about themselves.

All moments are the broker's stamps of these records, so no clock of a worker or gateway counts. The
newest record of any worker tells the time. Between two records the time goes on for `HOLD_S` at
most: while Kafka is away no record comes, and no worker may count as lost for that.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.core.attempt import AttemptId

# Seconds between two records of a worker.
INTERVAL_S = 5.0
# Intervals without a record after which a worker counts as lost.
MISSED = 2
# Seconds for which the time goes on without a record. Gateways write as often, so the time of a
# gateway that reads its own records never stands still.
HOLD_S = 0.8 * INTERVAL_S
# Seconds for which a lost worker stays listed.
KEEP_S = 3600.0
# Workers in memory; the one that was silent for longest is forgotten first.
MOST = 5_000
# Bytes of their records. A worker says what it likes of itself, and must not fill the memory of
# gateways.
MOST_BYTES = 12 * 1024 * 1024

Kind = Literal["worker", "gateway", "http"]


@dataclass(frozen=True, slots=True)
class OfType:
    """A worker's part for one type.

    Attributes:
        stages: it has handlers for; None when it does not say.
        in_flight: attempts that it has taken and not ended.
        attempts: the first of them.
    """

    stages: Sequence[str] | None = None
    in_flight: int = 0
    attempts: Sequence[AttemptId] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as a record describes it.

    Attributes:
        id: of the worker; of a gateway its host and process id.
        kind: "worker" reads Kafka, "gateway" reads Kafka for workers over HTTP, "http" is one of
            those.
        host: its name; over HTTP the one that it gave, or the address of its last request.
        version: of Penstock, or the one that a worker over HTTP gave; None when it does not say.
        interval_s: seconds between two signs of life.
        types: by name.
        slots: handlers that it runs at once; None when it does not say.
        room: how many more attempts it would take now; None when it does not say.
        silent_ms: age of its last sign of life when the record was written, in milliseconds.
        stopped: whether it has ended in order, and says so.
    """

    id: str
    kind: Kind
    host: str
    interval_s: float
    types: Mapping[str, OfType] = field(default_factory=dict)
    version: str | None = None
    slots: int | None = None
    room: int | None = None
    silent_ms: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker of the list.

    Attributes:
        status: by its last record.
        seen_ms: its last sign of life, in milliseconds since 1970 by the broker's clock.
        lost: whether it was silent for too long.
    """

    status: WorkerStatus
    seen_ms: int
    lost: bool


class WorkerList:
    """The workers by id.

    Args:
        most: workers in memory.
        most_bytes: of their records.

    Attributes:
        newest_ms: stamp of the newest record; None before the first one.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes: dict[str, int] = {}
        self._total_bytes = 0
        # In the order of their records.
        self._workers: OrderedDict[str, tuple[WorkerStatus, int]] = OrderedDict()
        self.newest_ms: int | None = None
        self._read_s = 0.0

    def add(self, statuses: Sequence[WorkerStatus], at_ms: int, now_s: float, size: int = 0) -> None:
        """Adds what a record says.

        Args:
            statuses: of the record.
            at_ms: the broker's stamp of the record, in milliseconds since 1970.
            now_s: when it was read, in seconds on a monotonic clock.
            size: of the record, in bytes.
        """
        # Not the largest stamp: the clock of a broker may be set back.
        self.newest_ms, self._read_s = at_ms, now_s
        for status in statuses:
            seen_ms = at_ms - status.silent_ms
            known = self._workers.get(status.id)
            # Two gateways may know the same worker over HTTP.
            if known is not None and status.kind == "http" and known[1] > seen_ms:
                continue
            self._workers[status.id] = status, seen_ms
            self._workers.move_to_end(status.id)
            part = size // len(statuses)
            self._total_bytes += part - self._bytes.get(status.id, 0)
            self._bytes[status.id] = part
        while len(self._workers) > self._most or self._total_bytes > self._most_bytes:
            self._remove(next(iter(self._workers)))

    def _remove(self, worker: str) -> None:
        del self._workers[worker]
        self._total_bytes -= self._bytes.pop(worker)

    def age_s(self, now_s: float) -> float | None:
        """Seconds since a record was read; None before the first one."""
        return None if self.newest_ms is None else max(0.0, now_s - self._read_s)

    def has_stopped(self, worker: str) -> bool:
        """Whether a worker has said that it ends."""
        known = self._workers.get(worker)
        return known is not None and known[0].stopped

    def by_type(self, now_s: float) -> dict[str, list[Seen]]:
        """The workers of each type that have not stopped, and forgets those that are gone for long.

        Args:
            now_s: in seconds on the clock of `add`.
        """
        found: dict[str, list[Seen]] = defaultdict(list)
        if self.newest_ms is None:
            return found
        now_ms = self.newest_ms + 1000 * min(max(0.0, now_s - self._read_s), HOLD_S)
        for worker, (status, seen_ms) in list(self._workers.items()):
            silent_s = (now_ms - seen_ms) / 1000
            lost = silent_s >= MISSED * status.interval_s
            if silent_s > KEEP_S or (lost and _has_left(status)):
                self._remove(worker)
            elif not status.stopped:
                seen = Seen(status, seen_ms, lost)
                for name in status.types:
                    found[name].append(seen)
        return found


def _has_left(status: WorkerStatus) -> bool:
    """Whether silence is the end of this worker, and no loss.

    A worker over HTTP cannot say that it ends.
    """
    return status.kind == "http" and not any(of_type.in_flight for of_type in status.types.values())
