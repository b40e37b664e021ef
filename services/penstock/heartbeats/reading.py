"""Finding out until when everything that workers said was read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from penstock.core.acknowledgement import Partition
from penstock.core.reading import ReadingProgress
from penstock.errors import Unavailable

log = logging.getLogger(__name__)

# Records may linger on their way for about this long; worth waiting for, so that expiry is not a tick later.
PATIENCE_S = 0.5
LOOK_EVERY_S = 0.05


class Reading:
    """How far the reading of the heartbeats topic has come.

    Args:
        ends: asks the broker where the partitions end.
        expected: what is to be read next of each.
    """

    def __init__(
        self,
        ends: Callable[[], Awaitable[Mapping[Partition, int]]],
        expected: Callable[[], Mapping[Partition, int]],
    ) -> None:
        self._ends = ends
        self._expected = expected
        self._progress: ReadingProgress[Partition] = ReadingProgress()

    @property
    def until_s(self) -> dict[int, float]:
        """By number of partition: everything said before then was heard."""
        return {number: until_s for (_topic, number), until_s in self._progress.until_s.items()}

    async def look(self, now_s: float, patience_s: float = PATIENCE_S) -> bool:
        """Asks where the partitions end, and waits a moment until all that is there was read.

        Returns whether it was. When the broker does not answer nothing is known anew, and nobody is called silent.
        """
        try:
            self._progress.asked(await self._ends(), now_s)
        except Unavailable as error:
            log.warning("it is not known whether all heartbeats were read: %s", error)
            return False
        looks = round(patience_s / LOOK_EVERY_S)
        self._progress.read(self._expected())
        while not self._progress.has_read(now_s) and looks:
            looks -= 1
            await asyncio.sleep(LOOK_EVERY_S)
            self._progress.read(self._expected())
        return self._progress.has_read(now_s)
