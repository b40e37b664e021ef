"""How the publisher of the outbox ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.waiting import in_time, wait_until

from penstock.contracts.event import OutboxEntry
from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.errors import KafkaUnavailable, RecordsRefused
from penstock.kafka.processing import outbox
from penstock.kafka.processing.outbox import Publisher, publish, revoke
from penstock.settings import Kafka


class Blocked:
    """A statement or request that ends only some turns of the loop after its cancellation."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.ended = False

    async def __call__(self, *_arguments: object) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            self.ended = True


async def _nothing(*_arguments: object) -> None:
    pass


@pytest.mark.parametrize("step", ["publish", "delete"])
async def test_a_cancelled_drain_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """O11: a service that is ended during its drain closes the producer and the pool only after
    their last use."""
    blocked = Blocked()
    monkeypatch.setattr(outbox, "publish", blocked if step == "publish" else _nothing)
    monkeypatch.setattr(outbox, "DELETE_EVERY_S", 0.0)
    delete: Any = blocked if step == "delete" else _nothing
    publisher = Publisher(None, Kafka(), delete)
    publisher.enqueue(OutboxEntry(outbox_id=1, record_keys=[b"1"], events=[b"{}"]))
    draining = asyncio.create_task(publisher.drain())
    await blocked.began.wait()
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    assert blocked.ended


async def test_a_drain_waits_for_publication_and_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: the drain ends when the rows of all published events are deleted."""
    monkeypatch.setattr(outbox, "publish", _nothing)
    monkeypatch.setattr(outbox, "DELETE_EVERY_S", 0.0)
    deleted: list[int] = []

    async def delete(ids: Sequence[int]) -> None:
        await asyncio.sleep(0)
        deleted.extend(ids)

    publisher = Publisher(None, Kafka(), delete)
    for number in (1, 2):
        publisher.enqueue(OutboxEntry(outbox_id=number, record_keys=[b"1"], events=[b"{}"]))
    await publisher.drain()
    assert deleted == [1, 2]


class UnavailableFor:
    """Kafka that fails for some requests, and then keeps the revocations it gets."""

    def __init__(self, failures: float) -> None:
        self.failures = failures
        self.revoked: list[tuple[str, list[AttemptId]]] = []

    async def __call__(self, _producer: object, _settings: object, revocation: Revocation) -> None:
        if self.failures:
            self.failures -= 1
            raise KafkaUnavailable("no broker")
        self.revoked.append((revocation.why, list(revocation.tasks)))


def _revoking(task_id: int, why: str = "cancelled") -> OutboxEntry:
    return OutboxEntry(revocation=Revocation(why, [AttemptId(task_id, 0, 0)]))


async def test_revocations_are_published_when_kafka_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """H3: what was revoked while Kafka was unavailable is published by the same process as soon as
    Kafka answers again."""
    kafka = UnavailableFor(3)
    monkeypatch.setattr(outbox, "revoke", kafka)
    publisher = Publisher(None, Kafka(), _nothing)
    publisher.enqueue(_revoking(1))
    publisher.enqueue(_revoking(2, "superseded"))
    await wait_until(lambda: len(kafka.revoked) == 2, what="both revocations are published")
    assert sorted(kafka.revoked) == [("cancelled", [(1, 0, 0)]), ("superseded", [(2, 0, 0)])]
    await publisher.drain()


async def test_a_drain_does_not_wait_for_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """O11: a process that stops while Kafka is away leaves its revocations to the sweeper and to
    heartbeats."""
    kafka = UnavailableFor(float("inf"))
    monkeypatch.setattr(outbox, "revoke", kafka)
    publisher = Publisher(None, Kafka(), _nothing)
    publisher.enqueue(_revoking(1))
    await in_time(publisher.drain())
    assert kafka.revoked == []


async def test_unpublished_revocations_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """H11: a long outage of Kafka costs a bounded amount of memory."""
    kafka = UnavailableFor(float("inf"))
    monkeypatch.setattr(outbox, "revoke", kafka)
    monkeypatch.setattr(outbox, "MAX_UNREVOKED", 3)
    publisher = Publisher(None, Kafka(), _nothing)
    for task_id in range(1, 9):
        publisher.enqueue(_revoking(task_id))
        await wait_until(lambda: not publisher.in_flight)
    kafka.failures = 0
    await wait_until(lambda: kafka.revoked, what="revocations are published")
    await publisher.drain()
    assert [task.task_id for _why, tasks in kafka.revoked for task in tasks] == [1, 2, 3]


async def test_a_topic_that_refuses_revocations_ends_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """O1: Kafka refuses the revocation (a limit or policy of the topic). The events of the same
    batch are published, and their row is deleted."""

    async def refuse(*_arguments: object) -> None:
        raise RecordsRefused("too large")

    deleted: list[int] = []

    async def delete(ids: Sequence[int]) -> None:
        deleted.extend(ids)

    monkeypatch.setattr(outbox, "send_all", refuse)
    monkeypatch.setattr(outbox, "publish", _nothing)
    monkeypatch.setattr(outbox, "DELETE_EVERY_S", 0.0)
    publisher = Publisher(None, Kafka(), delete)
    entry = OutboxEntry(outbox_id=1, record_keys=[b"1"], events=[b"{}"], revocation=_revoking(1).revocation)
    publisher.enqueue(entry)
    await publisher.drain()
    assert deleted == [1]
    assert "revocations_refused" in {vars(each).get("event") for each in caplog.records}


class CancellingProducer:
    """A producer that cancels its caller, or its own request, while it closes."""

    def __init__(self, step: str) -> None:
        self._step = step

    def _reach(self, step: str) -> None:
        if step == self._step:
            raise asyncio.CancelledError

    async def partitions_for(self, _topic: str) -> set[int]:
        self._reach("metadata")
        return {0}

    def create_batch(self) -> CancellingProducer:
        return self

    def append(self, **_record: object) -> object:
        return self

    async def send_batch(self, *_arguments: object, **_options: object) -> asyncio.Future[None]:
        self._reach("send")
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        return future


@pytest.mark.parametrize("step", ["metadata", "send", "answer"])
async def test_a_producer_that_closes_itself_is_unavailable(step: str) -> None:
    """O1: the sweeper publishes the events later. The cancellation ended the part that wrote them,
    and with it the process."""
    producer: Any = CancellingProducer(step)
    with pytest.raises(KafkaUnavailable):
        await publish(producer, Kafka(), [b"1"], [b"{}"])
    with pytest.raises(KafkaUnavailable):
        await revoke(producer, Kafka(), Revocation("cancelled", [AttemptId(1, 0, 0)]))
