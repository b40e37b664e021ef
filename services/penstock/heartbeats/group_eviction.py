"""Removes lost workers from their consumer groups."""

from __future__ import annotations

import asyncio
import logging

from penstock.errors import KafkaRefused, Unavailable
from penstock.kafka.topology.group_members import remove
from penstock.kafka.topology.topics import workers_group
from penstock.settings import Kafka

log = logging.getLogger(__name__)


class GroupEviction:
    """Removes lost workers from their groups, in the background.

    Kafka reserves a dead member's partitions until its session expires, and tasks released to them
    wait. Leases may be shorter than sessions. When Kafka does not answer, the session's expiry does
    the same later.

    Args:
        settings: where Kafka is.
    """

    def __init__(self, settings: Kafka) -> None:
        self._settings = settings
        self._evictions: set[asyncio.Task[None]] = set()

    def evict(self, worker: str, types: set[str]) -> None:
        """Removes a lost worker from the groups of these types."""
        task = asyncio.create_task(self._evict(worker, types))
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)

    async def _evict(self, worker: str, types: set[str]) -> None:
        for name in sorted(types):
            try:
                found = await remove(self._settings, workers_group(self._settings.prefix, name), worker)
            except (Unavailable, KafkaRefused) as error:
                log.warning(
                    "A lost worker may still hold partitions",
                    extra={
                        "event": "eviction_failed",
                        "worker": worker,
                        "task_type": name,
                        "error": str(error),
                    },
                )
            else:
                if found:
                    log.warning(
                        "A lost worker is removed from its consumer group",
                        extra={"event": "worker_evicted", "worker": worker, "task_type": name},
                    )
