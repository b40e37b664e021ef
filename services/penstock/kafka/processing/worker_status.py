"""Writes what a worker or gateway says about itself, every few seconds.

It fails open: without these records the process works as before, and Kafka's groups show it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from aiokafka import AIOKafkaProducer

from penstock.concurrency.cancellation import cleanup_timeout
from penstock.errors import KafkaRefused, KafkaUnavailable, PenstockError, Unavailable

log = logging.getLogger(__name__)

# Seconds for the last records of a process that ends.
STOP_S = 2.0
# Seconds for one record.
SEND_S = 2.0
# Most seconds between two tries while Kafka refuses them, or has no such topic.
REFUSED_S = 60.0


async def require_topic(producer: AIOKafkaProducer, topic: str) -> None:
    """Returns if the cluster has a topic; asks for it once where it is not known.

    To send to a missing topic is no way to learn of it: the client asks ten times a second.

    Raises:
        KafkaUnavailable: no broker answers.
        KafkaRefused: there is no such topic.
    """
    client = producer.client
    if client.cluster.partitions_for_topic(topic) is not None:
        return
    # An answer that was under way when the topic was added does not have it.
    await client.add_topic(topic)
    if client.cluster.partitions_for_topic(topic) is None and not await client.force_metadata_update():
        raise KafkaUnavailable("Kafka: no broker answers")
    unauthorized = topic in client.cluster.unauthorized_topics
    if client.cluster.partitions_for_topic(topic) is None and not unauthorized:
        raise KafkaRefused(f"there is no topic {topic}: `penstock topics apply`")


class StatusSender:
    """Writes the records of one process.

    Args:
        values: the values of the records, as of now; called with whether the process ends.
        write: writes one of them.
        every_s: seconds between two calls.
    """

    def __init__(
        self,
        values: Callable[[bool], Iterable[bytes]],
        write: Callable[[bytes], Awaitable[None]],
        every_s: float,
    ) -> None:
        self._values = values
        self._write = write
        self._every_s = every_s
        self._refused = False
        self._stopped = False

    async def run(self) -> None:
        """Writes until cancelled, or until `say_stopped` is called."""
        pause_s = self._every_s
        while not self._stopped:
            await self._send(stopped=False)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REFUSED_S) if self._refused else self._every_s

    async def say_stopped(self) -> None:
        """Writes that the process ends in order; without it, the process will count as lost."""
        self._stopped = True
        try:
            async with cleanup_timeout(STOP_S):
                await self._send(stopped=True)
        except TimeoutError:
            return

    async def _send(self, *, stopped: bool) -> None:
        try:
            for value in self._values(stopped):
                async with cleanup_timeout(SEND_S):
                    await self._write(value)
            self._refused = False
        except (Unavailable, TimeoutError):
            # Other writes of this process report the outage. The next record makes up for this one.
            return
        except PenstockError as error:
            # Also a fatal one: a worker whose access list is older than this topic works on.
            if not self._refused:
                self._refused = True
                log.warning(
                    "Signs of life are refused; this process is listed by its consumer groups only",
                    extra={"event": "worker_status_refused", "error": error},
                )
