"""Back-pressure: how much of what HTTP workers say may be on its way to Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import Throttled


class Backlog:
    """Bodies that were read and are not on Kafka yet. A slow Kafka (or PostgreSQL) fills it, and it fills no memory.

    Args:
        limit_bytes: most bytes; one body always fits an empty backlog.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0

    @contextmanager
    def place(self, size_bytes: int) -> Iterator[None]:
        """A place for one body, for the time of a `with` block.

        Raises:
            Throttled: there is none; nothing of it was done.
        """
        if self._bytes and self._bytes + size_bytes > self._limit_bytes:
            raise self._full()
        self._bytes += size_bytes
        try:
            yield
        finally:
            self._bytes -= size_bytes

    def require_calm(self) -> None:
        """Does nothing while less than half is taken: reports of what is in hand go before more to be in hand.

        Raises:
            Throttled: more is taken.
        """
        if self._bytes * 2 > self._limit_bytes:
            raise self._full()

    def _full(self) -> Throttled:
        return Throttled(
            f"{self._bytes:,} bytes of reports are on their way to Kafka, of {self._limit_bytes:,} that may be"
        )
