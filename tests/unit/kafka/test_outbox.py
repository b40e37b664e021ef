"""How the publisher of the outbox ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.contracts.event import OutboxEntry
from penstock.kafka import outbox
from penstock.kafka.outbox import Publisher
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
