"""The marks of progress of task-sync, for its stall detector.

Work in progress has a mark; a full window has none, since it waits for workers. A stall ends the
process; the next owner continues from PostgreSQL and the batch notes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from penstock.concurrency.stall_detector import StallDetector
from penstock.ingest import Ingest, IngestProgress
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.task_sync.release import ReleaseLoop


class Progress:
    """Watches ingest and release.

    Args:
        limit_s: seconds without progress that are a stall.
        offsets: asks the broker for the lag.
        ingest: names its work in progress, and its positions.
        release_loop: names its work in progress.
        servers: see `StallDetector`.

    Attributes:
        detector: raises when work makes no progress.
        ingest: the progress of ingest, and its lag.
    """

    def __init__(
        self,
        limit_s: float,
        offsets: OffsetReader,
        ingest: Ingest[Any],
        release_loop: ReleaseLoop,
        servers: Sequence[Callable[[], Awaitable[None]]],
    ) -> None:
        self._release_loop = release_loop
        self.ingest = IngestProgress(limit_s, offsets, [ingest])
        self.detector = StallDetector(limit_s, self._marks, servers)

    def _marks(self) -> dict[str, Hashable]:
        return self._release_loop.progress() | self.ingest.marks()
