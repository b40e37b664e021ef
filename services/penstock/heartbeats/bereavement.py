"""What is done about a worker that was lost, beside ending its attempts."""

from __future__ import annotations

import asyncio
import logging

from penstock.errors import Unavailable
from penstock.kafka.membership import remove
from penstock.kafka.topics import workers_group
from penstock.settings import Kafka

log = logging.getLogger(__name__)


class Bereavement:
    """Takes lost workers out of their groups, in the background.

    Kafka keeps a dead member's partitions for it until its session ends, and what is released to them waits so
    long; leases may be shorter than sessions. In doubt (Kafka does not answer) the session's end does it.
    """

    def __init__(self, settings: Kafka) -> None:
        self._settings = settings
        self._under_way: set[asyncio.Task[None]] = set()

    def lost(self, worker: str, types: set[str]) -> None:
        """A worker was lost with tasks of these types."""
        task = asyncio.create_task(self._remove(worker, types))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _remove(self, worker: str, types: set[str]) -> None:
        for name in sorted(types):
            try:
                found = await remove(self._settings, workers_group(self._settings.prefix, name), worker)
            except Unavailable as error:
                log.warning("worker %s may still hold partitions of %s: %s", worker, name, error)
            else:
                if found:
                    log.warning(
                        "worker %s is lost: taken out of the group of %s",
                        worker,
                        name,
                        extra={"worker": worker, "type": name},
                    )
