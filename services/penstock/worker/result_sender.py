"""Sends the results of a worker in batches, and then the ends of their leases."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from typing import Protocol

import orjson

from penstock.concurrency.batcher import Batcher
from penstock.contracts.context import INLINE_LIMIT_BYTES, ContentType, Context
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import RESULTS_PER_RECORD, StageResult, encode_results, handed_back, unwritable
from penstock.core.attempt import AttemptId
from penstock.errors import PenstockError
from penstock.kafka.client.connection import MAX_RECORD_BYTES
from penstock.process import run_all

log = logging.getLogger(__name__)

# Seconds in which ended leases are collected for one record. Their results are on Kafka by then, so
# a lease that ends a little later is harmless.
END_LEASES_S = 0.05
# The size of an entry without its texts, its context and its error; it keeps records below the
# broker's limit.
ENTRY_BYTES = 400
MAX_BATCH_BYTES = MAX_RECORD_BYTES // 2
# Large contexts that are stored at the same time.
CONCURRENT_STORES = 64
PARKED_BYTES = 64 * 1024 * 1024
UNSTORED_REASON = "the worker stopped while its result waited for the object store"


class ResultTransport(Protocol):
    """Sends results to Kafka or to a gateway."""

    async def send_results(self, results: Sequence[StageResult]) -> None:
        """Returns once they are stored.

        Raises:
            TypeError, ValueError: one of them cannot be encoded; none is sent.
        """

    async def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Returns once it is stored."""


class ResultSender:
    """Sends results in batches, then ends their leases.

    Made in the loop in which it runs; results may be added from any thread.

    Args:
        transport: sends results and ends of leases.
        worker_id: of the worker.
        on_sent: called with results that are stored; returns which of their attempts have a lease.
        still_in_flight: called before each batch; returns which of its attempts this worker still
            has. A result of a lost or revoked attempt is not sent, because another worker may have
            begun it.
        start: called with attempts that follow results which are stored.
        park: called with an attempt whose result waits for the object store; frees its room.
        store: stores the large context of a result and returns the result with a reference, or None
            when the attempt is lost. None when a gateway stores large contexts.
        parked_bytes: most bytes of large contexts that wait without room of their attempts. It
            bounds the memory of a worker in an outage of the store.
    """

    def __init__(
        self,
        transport: ResultTransport,
        worker_id: str,
        on_sent: Callable[[Sequence[StageResult]], Iterable[AttemptId]],
        still_in_flight: Callable[[list[AttemptId]], Container[AttemptId]],
        start: Callable[[list[ReadyTask]], object] = lambda _follows: None,
        park: Callable[[AttemptId], object] = lambda _attempt_id: None,
        store: Callable[[StageResult], Awaitable[StageResult | None]] | None = None,
        parked_bytes: int = PARKED_BYTES,
    ) -> None:
        self._most_parked_bytes = parked_bytes
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._worker_id = worker_id
        self._on_sent = on_sent
        self._start = start
        self._still_in_flight = still_in_flight
        # Results that other threads have added, and whether this loop will move them.
        self._added: deque[StageResult] = deque()
        self._move_scheduled = False
        self._ending = False
        self._results: Batcher[StageResult] = Batcher(
            self._send, max_size=MAX_BATCH_BYTES, size_of=_size_bytes
        )
        # Results that can be sent only while the object store answers. Others do not wait behind
        # them.
        self._large: Batcher[StageResult] = (
            Batcher(self._send_large, max_size=MAX_BATCH_BYTES, size_of=_size_bytes)
            if store is None
            else Batcher(self._send_large, max_size=1, writers=CONCURRENT_STORES)
        )
        self._store = store
        self._park = park
        # Results that `_large` has not sent, and the bytes of the parked ones.
        self._waiting: dict[AttemptId, StageResult] = {}
        self._parked: dict[AttemptId, int] = {}
        self._parked_bytes = 0
        self._ended: Batcher[AttemptId] = Batcher(self._end_leases, linger_s=lambda _previous: END_LEASES_S)

    def add(self, result: StageResult) -> None:
        """Adds a result to the next batch."""
        self._added.append(result)
        # One call a batch. A thread that sees the flag set has added its result before the move.
        if not self._move_scheduled:
            self._move_scheduled = True
            self._loop.call_soon_threadsafe(self._move_added)

    def _move_added(self) -> None:
        self._move_scheduled = False
        while self._added:
            result = self._added.popleft()
            if size_bytes := _unstored_bytes(result):
                self._add_large(result, size_bytes)
            else:
                self._results.add(result)

    def _add_large(self, result: StageResult, size_bytes: int) -> None:
        attempt_id = result.fence.attempt_id
        self._waiting[attempt_id] = result
        if self._parked_bytes + size_bytes <= self._most_parked_bytes:
            self._parked[attempt_id] = size_bytes
            self._parked_bytes += size_bytes
            self._park(attempt_id)
        self._large.add(result)

    def begin_end(self) -> None:
        """The worker stops: tasks with which it would go on are handed back."""
        self._ending = True

    async def run(self) -> None:
        """Sends until cancelled.

        Raises:
            Fatal: no result can be sent any more.
        """
        await run_all(self._results.run(), self._large.run(), self._ended.run())

    async def wait_sent(self, store_s: float = math.inf) -> None:
        """Waits until all added results are stored and their leases have ended.

        Args:
            store_s: seconds until attempts whose results wait for the object store are handed back.

        Raises:
            Fatal: some results were not stored.
        """
        self._move_added()
        try:
            async with asyncio.timeout(None if store_s == math.inf else store_s):
                await self._large.wait_idle()
        except TimeoutError:
            await self._large.stop()
            log.warning(
                "Large results were not stored before the worker stops; their attempts are handed back",
                extra={"event": "unstored_results_returned", "results": len(self._waiting)},
            )
            for result in self._waiting.values():
                began_ms, ended_ms = result.started_ms, result.finished_ms
                self._results.add(
                    handed_back(result.fence, UNSTORED_REASON, started_ms=began_ms, finished_ms=ended_ms)
                )
        await self._results.wait_idle()
        await self._ended.wait_idle()

    async def _send_large(self, results: Sequence[StageResult]) -> None:
        if self._store is None:
            await self._send(results)
        else:
            for result in results:
                if (stored := await self._store(result)) is not None:
                    self._results.add(stored)
        for result in results:
            self._waiting.pop(result.fence.attempt_id, None)
            self._parked_bytes -= self._parked.pop(result.fence.attempt_id, 0)

    async def _send(self, results: Sequence[StageResult]) -> None:
        batch = self._without_lost(results)
        if not batch:
            return
        if self._ending:
            for result in batch:
                result.goes_on, result.follows = None, None
        try:
            await self._transport.send_results(batch)
        except PenstockError:
            raise
        except Exception:  # noqa: BLE001 (`encodable` raises it again for the result at fault)
            # Nothing was sent. Outcomes are checked when a handler returns them, so this is a
            # defect, and it must cost one attempt only.
            batch = [encodable(result) for result in batch]
            await self._transport.send_results(batch)
        for attempt_id in self._on_sent(batch):
            self._ended.add(attempt_id)
        if follows := [result.follows for result in batch if result.follows is not None]:
            if self._ending:
                # The handlers take nothing more.
                for ready in follows:
                    self._results.add(handed_back(ready.fence, "the worker is stopping"))
            else:
                self._start(follows)

    async def _end_leases(self, attempt_ids: Sequence[AttemptId]) -> None:
        await self._transport.send_heartbeat(Heartbeat(Kind.RELEASE, self._worker_id, 0, list(attempt_ids)))

    def _without_lost(self, results: Sequence[StageResult]) -> list[StageResult]:
        attempt_ids = [result.fence.attempt_id for result in results]
        in_flight = self._still_in_flight(attempt_ids)
        batch = [
            result for result, attempt_id in zip(results, attempt_ids, strict=True) if attempt_id in in_flight
        ]
        if len(batch) < len(results):
            log.info(
                "Results of lost attempts are not sent",
                extra={"event": "results_dropped", "results": len(results) - len(batch)},
            )
        return batch


def _unstored_bytes(result: StageResult) -> int:
    """The size of a context that is not stored yet, and is too large to be inline; else 0."""
    context = result.context
    # A result of other types is a defect, which `encodable` finds.
    data = context.data if isinstance(context, Context) else None
    return len(data) if isinstance(data, bytes) and len(data) > INLINE_LIMIT_BYTES else 0


def encodable(result: StageResult) -> StageResult:
    """The result, or a failure in its place when it cannot be encoded."""
    try:
        encode_results("", [result])
    except Exception as error:  # noqa: BLE001 (the error becomes the result of its attempt)
        return unwritable(result, repr(error)[:1000])
    return result


def _context_bytes(context: Context) -> int:
    data = context.data
    if data is None or context.content_type is ContentType.BYTES:
        return len(data or b"") * 4 // 3
    return len(data if context.content_type is ContentType.JSON else orjson.dumps(data.decode()))


def _size_bytes(result: StageResult) -> int:
    """The most bytes of its entry; at least the share of a record that has the most entries.

    A broker refuses a record that is too large each time, so an estimate must not be too low: a
    control character has six bytes in JSON.
    """
    fence = result.fence
    try:
        size_bytes = ENTRY_BYTES + 6 * (len(fence.stage) + len(result.next_stage or ""))
        if result.context is not None:
            size_bytes += _context_bytes(result.context)
        if result.error is not None:
            size_bytes += len(orjson.dumps(result.error.to_wire()))
    except Exception:  # noqa: BLE001 (`_send` replaces it; the size puts it into a record of its own)
        return MAX_BATCH_BYTES
    return max(size_bytes, MAX_BATCH_BYTES // RESULTS_PER_RECORD)
