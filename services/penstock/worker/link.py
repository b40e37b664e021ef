"""The worker's way to Kafka: claims, beats, results and releases, each a batch in one record."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

from aiokafka import AIOKafkaProducer

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.result import RESULTS_PER_RECORD, Failure, StageResult, encode_results
from penstock.core.beats import Answer
from penstock.core.completion import Outcome
from penstock.core.leases import Key
from penstock.core.retry import RetryPolicy
from penstock.errors import KafkaUnavailable
from penstock.kafka.connection import MAX_RECORD_BYTES, translated
from penstock.kafka.topics import HEARTBEATS, STAGE_RESULTS
from penstock.settings import Kafka

log = logging.getLogger(__name__)

# Releases are in no hurry: the results are on Kafka, and a lease that lives a little longer harms nobody.
RELEASE_S = 0.05
WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.1, factor=2, max_s=5.0, jitter=0)
# What one entry takes beside its context and error, roughly: only to keep records below the broker's limit.
ENTRY_BYTES = 400


class Link:
    """Writes what a worker has to say, in the order in which it says it.

    Args:
        producer: started, acks=all.
        settings: for the prefix of the topics.
        worker_id: the key of every record, so that the order holds.
    """

    def __init__(self, producer: AIOKafkaProducer, settings: Kafka, worker_id: str) -> None:
        self._producer = producer
        self._heartbeats = settings.prefix + HEARTBEATS.name
        self._results = settings.prefix + STAGE_RESULTS.name
        self._worker_id = worker_id
        self._key = worker_id.encode()

    async def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Returns once Kafka has it, however long that takes."""
        await self._send(self._heartbeats, heartbeat.encode())

    async def try_heartbeat(self, heartbeat: Heartbeat) -> Mapping[Key, Answer]:
        """Sends once, for what the next one makes up for. What is on Kafka is heard.

        Raises:
            KafkaUnavailable: it is not on Kafka.
        """
        with translated():
            await self._producer.send_and_wait(self._heartbeats, heartbeat.encode(), key=self._key)
        return dict.fromkeys(heartbeat.tasks, Answer.HEARD)

    async def send_results(self, results: Sequence[StageResult]) -> None:
        """Returns once Kafka has them, however long that takes.

        Raises:
            TypeError, ValueError: one of them cannot be written; none is sent.
        """
        await self._send(self._results, encode_results(self._worker_id, results))

    async def _send(self, topic: str, value: bytes) -> None:
        tries = 0
        while True:
            try:
                with translated():
                    await self._producer.send_and_wait(topic, value, key=self._key)
            except KafkaUnavailable as error:
                tries += 1
                log.warning("cannot write to %s yet: %s", topic, error)
                await asyncio.sleep(WHILE_AWAY.delay_s(tries, 0.0))
            else:
                return


class Reporting(Protocol):
    """Whoever takes results: Kafka, or a gateway."""

    async def send_results(self, results: Sequence[StageResult]) -> None:
        """Returns once they are kept.

        Raises:
            TypeError, ValueError: one of them cannot be written; none is sent.
        """

    async def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Returns once it is kept."""


class Reports:
    """Sends results, as one record what has come in while the one before was on its way; then releases their leases.

    So a lone result is sent at once, and batches grow with the load.

    Made in the loop in which it runs; results may be added from any thread.

    Args:
        link: the way to whoever takes results.
        worker_id: whose leases they are.
        let_go: told of the attempts whose results are on Kafka.
        held: asked before each record which of these attempts are still this worker's to report on. What was given up or
            taken back since its handler ended is not sent: somebody else may have begun it.
    """

    def __init__(
        self,
        link: Reporting,
        worker_id: str,
        let_go: Callable[[list[Key]], None],
        held: Callable[[list[Key]], Container[Key]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._added: deque[StageResult] = deque()
        self._told = False
        self._link = link
        self._worker_id = worker_id
        self._let_go = let_go
        self._held = held
        self._waiting: list[StageResult] = []
        self._to_release: list[Key] = []
        self._some_to_release = asyncio.Event()
        self._some = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, result: StageResult) -> None:
        """A result to be sent with the next record."""
        self._added.append(result)
        # One call a batch: whoever sees that the other loop has been told has added before it looks.
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._take_over)

    def _take_over(self) -> None:
        self._told = False
        while self._added:
            self._waiting.append(self._added.popleft())
        if self._waiting:
            self._idle.clear()
            self._some.set()

    async def run(self) -> None:
        """Sends until cancelled."""
        await asyncio.gather(self._send_results(), self._send_releases())

    async def _send_results(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                batch = self._still_held(self._take())
                if not batch:
                    continue
                try:
                    await self._link.send_results(batch)
                except (TypeError, ValueError):
                    # Nothing was sent. A context made by hand can hold what is not what it says.
                    await self._link.send_results([_written(result) for result in batch])
                keys = _keys(batch)
                self._let_go(keys)
                self._to_release += keys
                self._some_to_release.set()
            self._idle.set()

    async def _send_releases(self) -> None:
        while True:
            await self._some_to_release.wait()
            await asyncio.sleep(RELEASE_S)
            await self._release()

    async def _release(self) -> None:
        keys, self._to_release = self._to_release, []
        self._some_to_release.clear()
        if keys:
            await self._link.send_heartbeat(Heartbeat(Kind.RELEASE, self._worker_id, 0, keys))

    async def wait_sent(self) -> None:
        """Waits until everything added is on Kafka, and the leases are released."""
        self._take_over()
        await self._idle.wait()
        await self._release()

    def _still_held(self, batch: list[StageResult]) -> list[StageResult]:
        keys = _keys(batch)
        held = self._held(keys)
        kept = [result for result, key in zip(batch, keys, strict=True) if key in held]
        if len(kept) < len(batch):
            log.info("%d results are not sent: their attempts were lost meanwhile", len(batch) - len(kept))
        return kept

    def _take(self) -> list[StageResult]:
        size = count = 0
        for result in self._waiting[:RESULTS_PER_RECORD]:
            size += _bytes(result)
            if count and size > MAX_RECORD_BYTES // 2:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch


def _keys(results: Sequence[StageResult]) -> list[Key]:
    return [(result.fence.id, result.fence.step, result.fence.attempt) for result in results]


def _written(result: StageResult) -> StageResult:
    """The result, or a failure in its place when no record can say it: it must not stop the others."""
    try:
        encode_results("", [result])
    except (TypeError, ValueError) as error:
        failure = Failure(kind="Unwritable", message=f"the handler's outcome cannot be written: {error}")
        return dataclasses.replace(
            result, outcome=Outcome.FAIL, next_stage=None, context=None, delay_ms=0, error=failure
        )
    return result


def _bytes(result: StageResult) -> int:
    size = ENTRY_BYTES
    if result.context is not None and result.context.data is not None:
        size += len(result.context.data) * 2
    if result.error is not None:
        size += (len(result.error.message) + len(result.error.traceback or "")) * 2
    return size
