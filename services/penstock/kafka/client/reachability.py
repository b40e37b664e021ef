"""Reports that a process has lost Kafka, which its consumers hide.

The client library retries a lost connection in silence, and `getmany` returns nothing meanwhile: an
idle process would look healthy. Each consumer requests metadata every few seconds. When its
requests have had no answer for `UNREACHABLE_S`, one warning is logged, and one entry when a broker
answers again. All consumers of a process share both.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

log = logging.getLogger(__name__)

# Seconds without an answer until Kafka counts as unreachable: longer than the restart of a broker
# in a cluster, whose other brokers answer.
UNREACHABLE_S = 10.0

# Faust's consumer has a thread of its own.
_lock = threading.Lock()
# The servers that the process has reported as unreachable.
_unreachable: set[str] = set()


class Reachability:
    """Watches one of aiokafka's clients.

    Args:
        client: the consumer's, started.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._servers = ",".join(sorted(f"{host}:{port}" for host, port, *_ in client.hosts))
        self._update = client._metadata_update  # noqa: SLF001 (the client has no hook)
        self._timer: asyncio.TimerHandle | None = None
        client._metadata_update = self._metadata_update  # noqa: SLF001 (see above)

    async def _metadata_update(self, *arguments: Any) -> bool:
        """Replaces the client's method, which returns whether a broker answered."""
        if self._timer is None:
            # Before the request: a broker that drops packets leaves it without an answer.
            self._timer = asyncio.get_running_loop().call_later(UNREACHABLE_S, self._report_lost)
        try:
            answered: bool = await self._update(*arguments)
        except BaseException:
            # Raised again: the client closes, and reports nothing.
            self._cancel_timer()
            raise
        if answered:
            self._cancel_timer()
            self._report_found()
        return answered

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report_lost(self) -> None:
        if self._client._sync_task is None:  # noqa: SLF001 (it has no method for this)
            return  # it was closed meanwhile
        with _lock:
            if self._servers in _unreachable:
                return
            _unreachable.add(self._servers)
        log.warning(
            "No Kafka broker answers; trying again until one does: check the servers in PENSTOCK_KAFKA",
            extra={"event": "kafka_unreachable", "servers": self._servers, "silent_s": UNREACHABLE_S},
        )

    def _report_found(self) -> None:
        with _lock:
            if self._servers not in _unreachable:
                return
            _unreachable.remove(self._servers)
        log.info("A Kafka broker answers again", extra={"event": "kafka_reachable", "servers": self._servers})
