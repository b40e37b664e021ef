"""Looking out for what Faust hangs in: a rebalance without end, a partition not read, a record never settled.

An idle processor and one without partitions are at rest, not at a standstill. In doubt about the lag (the broker
is away, or the records there are not for consumers) nothing is said.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from penstock.core.acknowledgement import Hand, Partition
from penstock.errors import Stalled, Unavailable
from penstock.kafka.faust_app import FaustApp
from penstock.kafka.observer import Observer
from penstock.kafka.watchdog import LoopWatchdog, Standstill

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class LookOut:
    """Watches one processor.

    Args:
        name: of the processor.
        limit_s: seconds without progress that are too many.
        app: Faust.
        observer: asked for the lag: Faust's own figures stand still when it does.
        hand: what is in hand.
        busy: topics whose agent is with a record now.
        watchdog: wound up at each look.
        lag: of each topic, kept up to date: how many records there are that are not taken yet.
    """

    def __init__(
        self,
        name: str,
        limit_s: float,
        app: FaustApp,
        observer: Observer,
        hand: Hand,
        busy: AbstractSet[str],
        watchdog: LoopWatchdog,
        lag: dict[str, int],
    ) -> None:
        self._name = name
        self._limit_s = limit_s
        self._app = app
        self._observer = observer
        self._hand = hand
        self._busy = busy
        self._watchdog = watchdog
        self._lag = lag
        # Offsets that are not read although there are records, by partition, as of a while ago.
        self._lagging: dict[Partition, int] = {}

    async def look(self) -> None:
        """Shows the watchdog that the loop turns, and looks whether everything else moves, until cancelled.

        Raises:
            Stalled: something does not.
            SessionLost: Faust has crashed.
        """
        standstill = Standstill(self._limit_s)
        while True:
            self._watchdog.wind(self._limit_s)
            self._app.check()
            still = standstill.look(time.monotonic(), self._marks())
            if still:
                raise Stalled(f"{self._name}: {', '.join(still)}: no progress for {self._limit_s:g} s")
            await asyncio.sleep(LOOK_EVERY_S)

    async def measure(self) -> None:
        """Keeps the lag up to date until cancelled."""
        before: dict[Partition, int] = {}
        while True:
            expected = self._hand.expected()
            try:
                ends = await self._observer.ends(expected)
                self._count(expected, ends)
                self._lagging = {
                    partition: offset
                    for partition, offset in expected.items()
                    if ends[partition] > offset
                    and before.get(partition) == offset
                    and partition[0] not in self._busy
                    # A transaction's mark is an offset, too, but no record.
                    and await self._observer.first_from(partition, offset) is not None
                }
            except Unavailable as error:
                log.info("%s: lag unknown: %s", self._name, error)
                self._lagging = {}
            before = expected
            await asyncio.sleep(self._limit_s / 6)

    def _count(self, expected: Mapping[Partition, int], ends: Mapping[Partition, int]) -> None:
        behind = dict.fromkeys(self._lag, 0)
        for (topic, number), offset in expected.items():
            behind[topic] += max(ends[topic, number] - offset, 0)
        self._lag.update(behind)

    def _marks(self) -> dict[str, int]:
        generation = self._app.generation
        if self._app.rebalancing or self._hand.generation != generation:
            # Each further rebalance changes the mark: a group that many join at once is moving.
            return {"rebalancing": generation}
        marks = {
            f"settling {topic}/{number} from {offset}": generation
            for (topic, number), offset in self._hand.held().items()
        }
        expected = self._hand.expected()
        for partition, offset in self._lagging.items():
            topic, number = partition
            # While an agent is with a record, those of other partitions rightly wait behind it.
            if expected.get(partition) == offset and topic not in self._busy:
                marks[f"reading {topic}/{number} from {offset}"] = generation
        return marks
