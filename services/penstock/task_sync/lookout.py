"""Looking out for a standstill: submissions that nobody takes in, released tasks that go nowhere.

At rest is who has nothing to do: no records, no partitions, or a window that is full because the workers do not take. In
doubt about the lag (the broker is away, or the records there are not for consumers) nothing is said of what takes a
broker: reading and joining the group. What is at hand must move all the same, whoever is away: the process ends then,
as it would by the error, and the next one goes on from what PostgreSQL and the notes say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable

from penstock.core.acknowledgement import Partition
from penstock.errors import Stalled, Unavailable
from penstock.kafka.observer import Observer
from penstock.kafka.topics import SUBMITTED
from penstock.kafka.watchdog import Standstill
from penstock.task_sync.ingest import Ingest
from penstock.task_sync.release import Release

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class LookOut:
    """Watches ingest and release.

    Args:
        limit_s: seconds without progress that are too many.
        observer: asked for the lag: the consumer's own figures stand still when it does.
        ingest: told by what it has at hand, and by its lag.
        gate: told by what it has at hand.

    Attributes:
        lag: records of `submitted` that were not in PostgreSQL when it was last looked.
    """

    def __init__(self, limit_s: float, observer: Observer, ingest: Ingest, gate: Release) -> None:
        self._limit_s = limit_s
        self._observer = observer
        self._ingest = ingest
        self._gate = gate
        # Offsets that are not read although there are records, as of a while ago; None when nobody can tell.
        self._lagging: dict[Partition, int] | None = None
        self.lag = 0

    async def look(self) -> None:
        """Looks until cancelled.

        Raises:
            Stalled: something does not move.
        """
        standstill = Standstill(self._limit_s)
        while True:
            still = standstill.look(time.monotonic(), self._marks())
            if still:
                raise Stalled(f"{', '.join(still)}: no progress for {self._limit_s:g} s")
            await asyncio.sleep(LOOK_EVERY_S)

    async def measure(self) -> None:
        """Keeps the lag up to date until cancelled."""
        before: dict[Partition, int] = {}
        while True:
            positions = self._positions()
            try:
                # Also of a partition that may be another's: somebody must answer for there to be a group.
                ends = await self._observer.ends({(SUBMITTED.name, 0), *positions})
                self.lag = sum(max(ends[partition] - offset, 0) for partition, offset in positions.items())
                self._lagging = {
                    partition: offset
                    for partition, offset in positions.items()
                    if ends[partition] > offset
                    and before.get(partition) == offset
                    and not self._ingest.under_way()
                    # A transaction's mark is an offset, too, but no record.
                    and await self._observer.first_from(partition, offset) is not None
                }
            except Unavailable as error:
                log.info("lag unknown: %s", error)
                self._lagging = None
            before = positions
            await asyncio.sleep(self._limit_s / 6)

    def _positions(self) -> dict[Partition, int]:
        return {(SUBMITTED.name, number): offset for number, offset in self._ingest.positions().items()}

    def _marks(self) -> dict[str, Hashable]:
        taking = self._ingest.under_way()
        marks = self._gate.under_way() | taking
        # While one partition's records are taken in, those of the others rightly wait behind them.
        if self._lagging is None or taking:
            return marks
        marks |= self._ingest.rebalancing()
        positions = self._positions()
        for partition, offset in self._lagging.items():
            if positions.get(partition) == offset:
                marks[f"reading {partition[0]}/{partition[1]} from {offset}"] = offset
        return marks
