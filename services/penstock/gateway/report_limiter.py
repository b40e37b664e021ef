"""Limits the bytes of HTTP workers' reports that are on their way to Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import Throttled


class ReportLimiter:
    """Counts the bodies of reports that were read and that Kafka does not have yet.

    Without it, a slow Kafka or PostgreSQL would fill the gateway's memory.

    Args:
        limit_bytes: most bytes; one body is always admitted when there is no other.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0

    @contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """Counts one body for the time of the block.

        Raises:
            Throttled: the limit is reached; nothing of the body is sent.
        """
        if self._bytes and self._bytes + size_bytes > self._limit_bytes:
            raise self._throttled()
        self._bytes += size_bytes
        try:
            yield
        finally:
            self._bytes -= size_bytes

    def require_half_free(self) -> None:
        """Returns while at most half of the limit is used: reports have priority over new claims.

        Raises:
            Throttled: more is used.
        """
        if self._bytes * 2 > self._limit_bytes:
            raise self._throttled()

    def _throttled(self) -> Throttled:
        return Throttled(
            f"{self._bytes:,} bytes of reports are on their way to Kafka, and {self._limit_bytes:,} are allowed"
        )
