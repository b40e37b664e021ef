"""Faust's consumer in the event loop of its service; Faust would run it in a thread of its own.

Each fetch would take four wake-ups between two threads, which cost more than the fetch itself. The
price: a loop that stalls for longer than the session timeout loses its partitions. Their records
are delivered again, as after any rebalance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from faust.transport.drivers.aiokafka import Consumer as FaustConsumer
from faust.types import TP
from mode.utils.futures import maybe_async

from penstock.kafka.client.connection import start, stop
from penstock.kafka.client.consumer import Consumer

# A subclass of Faust's services logs under its own module. Ours log under Faust's name, which
# `logs.quiet_libraries` silences.
_LOGGER = logging.getLogger("faust.of_penstock")


class LoopWorker:
    """Runs a service of Faust as a task; has the methods of Faust's thread.

    Args:
        service: what Faust would run in a thread.
    """

    def __init__(self, service: Any) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the service."""
        self._task = asyncio.create_task(self._service._serve())  # noqa: SLF001 (as the thread does)
        # Retrieved, or asyncio logs it: Faust has the error as well.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def stop(self) -> None:
        """Does nothing: `LoopThread.stop` awaits the end."""

    def cancel(self) -> None:
        """Cancels the service."""
        if self._task is not None:
            self._task.cancel()

    async def wait_ended(self) -> None:
        """Waits until the service has ended, unless it is the caller."""
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait({self._task})


class LoopThread(AIOKafkaConsumerThread):
    """The part of the consumer that Faust runs in a thread."""

    logger = _LOGGER
    Worker: Any = LoopWorker
    _has_started = False

    async def call_thread(self, fun: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls a function of the client; Faust would queue it for the thread."""
        return await maybe_async(fun(*args, **options))

    def _create_worker_consumer(self, _transport: Any) -> Consumer:
        return self.consumer.make()  # type: ignore[attr-defined, no-any-return]  # it is a `LoopConsumer`

    async def on_start(self) -> None:
        """Starts the client; ends it if that fails or is cancelled."""
        self._consumer = self._create_consumer(loop=self.thread_loop)
        self.time_started = time.monotonic()
        await start(self._consumer)

    async def on_thread_started(self) -> None:
        """Notes that the client has started."""
        self._has_started = True
        await super().on_thread_started()

    async def stop(self) -> None:
        """Stops the client and waits until it has ended."""
        worker: Any = self._thread
        if worker is not None and not self._has_started:
            # It would connect first, for as long as no broker answers.
            worker.cancel()
        await super().stop()
        if worker is not None:
            await worker.wait_ended()

    def close(self) -> None:
        """Does nothing: `on_thread_stop` stops the client.

        Faust calls it when it stops in a rebalance, and would close the connections of a client
        that still has to leave its group. The group would wait for it until its session ended.
        """

    async def on_thread_stop(self) -> None:
        """Stops the client."""
        await super(AIOKafkaConsumerThread, self).on_thread_stop()
        if self._consumer is not None:
            await stop(self._consumer)

    async def _shutdown_thread(self) -> None:
        try:
            await super()._shutdown_thread()
        finally:
            # Also after an error: `stop` would wait for a minute.
            self.set_shutdown()

    async def _keepalive2(self) -> None:
        """Replaces Faust's check of its thread."""

    async def _gather_remaining_tasks(self) -> None:
        """Replaces Faust's cancellation of all tasks of the loop: here it has others."""


class LoopConsumer(FaustConsumer):
    """The part of the consumer that Faust runs in the service's loop.

    Attributes:
        make: makes the client.
        starts: the first offsets of this generation; empty before they are known.
    """

    logger = _LOGGER
    make: Callable[[], Consumer]
    starts: Mapping[TP, int] = {}

    async def perform_seek(self) -> None:
        """Seeks to the starts: the commits, to which Faust seeks by itself, may not be valid.

        Faust seeks after a rebalance, and when it discards records that arrive meanwhile.
        """
        assigned = self.assignment()
        if starts := {tp: offset for tp, offset in self.starts.items() if tp in assigned}:
            await self.seek_wait(starts)
        else:
            await super().perform_seek()

    async def threadsafe_partitions_revoked(self, _loop: Any, revoked: set[TP]) -> None:
        """Calls the hook; Faust would queue it for another thread."""
        await self.on_partitions_revoked(revoked)

    async def threadsafe_partitions_assigned(
        self, _loop: Any, assigned: set[TP], generation_id: int = 0
    ) -> None:
        """As `threadsafe_partitions_revoked`."""
        await self.on_partitions_assigned(assigned, generation_id)

    def _new_consumer_thread(self) -> LoopThread:
        return LoopThread(self, loop=self.loop, thread_loop=self.loop, beacon=self.beacon)


def consumer_type(make: Callable[[], Consumer]) -> type[LoopConsumer]:
    """The type of consumers for Faust to make, whose client is made by this function."""
    return type("LoopConsumer", (LoopConsumer,), {"make": staticmethod(make)})
