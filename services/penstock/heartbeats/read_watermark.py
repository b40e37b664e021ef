"""Measures until when all heartbeats were read here, and all results by the stage processor."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping

from penstock.core.offset_tracker import Partition
from penstock.core.read_watermark import ReadWatermark
from penstock.errors import Unavailable
from penstock.heartbeats.results_progress import ResultsProgress

log = logging.getLogger(__name__)

# Records may wait for the next fetch for about this time. Without the wait an expiry would be a
# tick later.
LINGER_S = 0.5
POLL_EVERY_S = 0.05


class WatermarkReader:
    """How far this process has read the heartbeats topic.

    Args:
        ends: returns the partitions' ends, by the broker.
        expected: returns the offsets that are read next.
    """

    def __init__(
        self,
        ends: Callable[[], Awaitable[Mapping[Partition, int]]],
        expected: Callable[[], Mapping[Partition, int]],
    ) -> None:
        self._ends = ends
        self._expected = expected
        self._watermark: ReadWatermark[Partition] = ReadWatermark()

    @property
    def until_s(self) -> dict[int, float]:
        """By number of partition: everything that was written before then is read."""
        return {number: until_s for (_topic, number), until_s in self._watermark.until_s.items()}

    async def update(self, now_s: float, within_s: float = LINGER_S) -> bool:
        """Asks the broker for the ends, and waits at most `within_s` seconds until they are read.

        Returns whether they are. While the broker does not answer the watermark stays, so that no
        lease expires.
        """
        try:
            self._watermark.asked(await self._ends(), now_s)
        except Unavailable as error:
            log.warning(
                "The ends of the heartbeats topic are unknown; no lease expires meanwhile",
                extra={"event": "watermark_unknown", "error": str(error)},
            )
            return False
        polls = round(within_s / POLL_EVERY_S)
        self._watermark.read(self._expected())
        while not self._watermark.has_read(now_s) and polls:
            polls -= 1
            await asyncio.sleep(POLL_EVERY_S)
            self._watermark.read(self._expected())
        return self._watermark.has_read(now_s)


class ResultsWatermark:
    """How far the stage processor has committed the results topic.

    It counts all partitions together: a result may be on any of them, not only on the lease's.

    Args:
        progress: of the stage processor.
    """

    def __init__(self, progress: ResultsProgress) -> None:
        self._progress = progress
        self._watermark: ReadWatermark[int] = ReadWatermark()
        self.until_s = -math.inf

    async def update(self, now_s: float) -> None:
        """Asks for the ends and for the committed offsets; waits for nothing else.

        While the broker does not answer the watermark stays, so that no lease expires.
        """
        try:
            ends = await self._progress.ends()
            self._watermark.asked(ends, now_s)
            self._watermark.read(await self._progress.committed(ends))
        except Unavailable as error:
            log.warning(
                "The stage processor's progress is unknown; no lease expires meanwhile",
                extra={"event": "results_progress_unknown", "error": str(error)},
            )
            return
        self.until_s = self._watermark.all_until_s
