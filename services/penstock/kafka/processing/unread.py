"""Finds partitions that have records and whose reader does not advance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from penstock.core.offset_tracker import Partition
from penstock.errors import Unavailable
from penstock.kafka.client.offset_reader import OffsetReader

log = logging.getLogger(__name__)


class UnreadPartitions:
    """Polls the ends of partitions.

    Args:
        offsets: asks the broker; a client's own metrics stall when the client does.
        positions: returns the offset that is read next, by partition.
        is_busy: whether the reader of a partition is busy with a record, so that its other records
            wait.
        report: called with the lag of each partition: records that are not read yet.
        every_s: seconds between two polls.
        always: partitions that are asked for even if they are not read here.

    Attributes:
        stalled: offsets at which there was a record at the last poll, and which are the same as at
            the poll before. None while the broker does not answer.
    """

    def __init__(
        self,
        offsets: OffsetReader,
        positions: Callable[[], Mapping[Partition, int]],
        is_busy: Callable[[Partition], bool],
        report: Callable[[Mapping[Partition, int]], None],
        *,
        every_s: float,
        always: Collection[Partition] = (),
    ) -> None:
        self._offsets = offsets
        self._positions = positions
        self._is_busy = is_busy
        self._report = report
        self._every_s = every_s
        self._always = frozenset(always)
        self.stalled: dict[Partition, int] | None = None

    async def run(self) -> None:
        """Polls until cancelled."""
        previous: Mapping[Partition, int] = {}
        while True:
            positions = dict(self._positions())
            try:
                self.stalled = await self._poll(positions, previous)
            except Unavailable as error:
                log.info("The lag is unknown", extra={"event": "lag_unknown", "error": str(error)})
                self.stalled = None
            previous = positions
            await asyncio.sleep(self._every_s)

    async def _poll(
        self, positions: Mapping[Partition, int], previous: Mapping[Partition, int]
    ) -> dict[Partition, int]:
        ends = await self._offsets.ends(self._always | positions.keys())
        self._report({partition: max(ends[partition] - offset, 0) for partition, offset in positions.items()})
        return {
            partition: offset
            for partition, offset in positions.items()
            if ends[partition] > offset
            and previous.get(partition) == offset
            and not self._is_busy(partition)
            # The end of a transaction takes an offset and is no record.
            and await self._offsets.first_from(partition, offset) is not None
        }
