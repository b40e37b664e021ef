"""Results that wait for the object store: what they hold, and what becomes of them at a stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.heartbeat import Heartbeat
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.errors import ObjectsUnavailable
from penstock.objects import ObjectStore
from penstock.worker.contexts import ResultContexts
from penstock.worker.in_flight import InFlight
from penstock.worker.result_sender import ResultSender

LARGE = Context.encode("x" * 6_000)
NEVER_S = 3600.0


class Store(ObjectStore):
    """In memory; does not answer, or refuses, until `back` is set."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__("memory:///")
        self.back = asyncio.Event()
        self.tried = 0
        self._refuses = refuses

    async def check_in(self, context: Context, namespace: str) -> Context:
        self.tried += 1
        if self._refuses and not self.back.is_set():
            raise ObjectsUnavailable("the object store is away")
        await self.back.wait()
        return await super().check_in(context, namespace)


class Rig:
    """A result sender with its attempts in flight."""

    def __init__(self, store: Store | None, *, capacity: int = 2, **bounds: int) -> None:
        self.in_flight = InFlight(capacity)
        self.sent: dict[int, StageResult] = {}
        self.gateway_store = asyncio.Event()
        store_result = None if store is None else ResultContexts(store, self.in_flight.type_of).stored
        self.sender = ResultSender(
            self,
            "w",
            self._on_sent,
            lambda _ids: self.in_flight,
            park=self.in_flight.park,
            store=store_result,
            **bounds,
        )

    async def send_results(self, results: Sequence[StageResult]) -> None:
        if any(result.context is not None and len(result.context.data or b"") > 4096 for result in results):
            await self.gateway_store.wait()
        self.sent |= {result.fence.id: result for result in results}

    async def send_heartbeat(self, _heartbeat: Heartbeat) -> None:
        pass

    def _on_sent(self, results: Sequence[StageResult]) -> list[AttemptId]:
        self.in_flight.remove(attempt_ids := [result.fence.attempt_id for result in results])
        return attempt_ids

    async def claim(self, type_name: str, *numbers: int) -> None:
        for number in numbers:
            async with self.in_flight.reserve(type_name, 1, NEVER_S) as room:
                ready = ReadyTask(Fence(number, 0, "s", 0), type_name, Context.encode(None), 60_000)
                self.in_flight.add([ready], room)

    def end(self, *numbers: int, context: Context | None = None) -> None:
        for number in numbers:
            self.sender.add(
                StageResult(fence=Fence(number, 0, "s", 0), outcome=Outcome.DONE, context=context)
            )

    async def is_sent(self, *numbers: int) -> None:
        await wait_until(lambda: self.sent.keys() >= set(numbers), what=f"{numbers} are sent")


@pytest.mark.parametrize("over_http", [False, True])
async def test_other_types_have_room_while_results_wait(over_http: bool) -> None:
    """S11, W2: results that wait for the object store hold no room of the worker, over Kafka and
    over HTTP. Their attempts stay in flight, and are reported once the store is back."""
    store = None if over_http else Store()
    rig = Rig(store)
    await rig.claim("large", 1, 2)
    rig.end(1, 2, context=LARGE)
    await rig.claim("quick", 3, 4)
    rig.end(3, 4)
    await rig.is_sent(3, 4)
    assert len(rig.in_flight) == 2
    rig.gateway_store.set()
    if store is not None:
        store.back.set()
    await rig.is_sent(1, 2)
    assert len(rig.in_flight) == 0
    assert rig.sent[1].context is not None
    assert (rig.sent[1].context.ref is None) == over_http
    await rig.sender.wait_sent()


async def test_a_type_does_not_fill_the_worker_with_waiting_results() -> None:
    """S11, W2: a type whose waiting results would fill the pool gets no more room until some of
    them are stored. Other types do."""
    store = Store()
    rig = Rig(store)
    await rig.claim("large", 1, 2)
    rig.end(1, 2, context=LARGE)
    await rig.claim("quick", 3)
    async with rig.in_flight.reserve("large", 1, 0.0) as refused:
        assert refused.size == 0
    store.back.set()
    await rig.claim("large", 4)
    assert rig.sent.keys() & {1, 2}, "there was room before a result was stored"
    rig.end(3, 4)
    await rig.sender.wait_sent()


async def test_waiting_results_are_bounded_in_bytes() -> None:
    """W2, S11: beyond a number of bytes, results that wait for the store keep the room of their
    attempts, so that the worker's memory is bounded in an outage."""
    store = Store()
    rig = Rig(store, parked_bytes=10_000)
    await rig.claim("large", 1, 2)
    rig.end(1, 2, context=LARGE)
    await wait_until(lambda: store.tried == 2)
    assert rig.in_flight.room == 1
    store.back.set()
    await rig.sender.wait_sent()
    await rig.claim("large", 3)
    rig.end(3, context=LARGE)
    await rig.sender.wait_sent()
    assert rig.in_flight.room == 2


@pytest.mark.parametrize("over_http", [False, True])
async def test_a_stopping_worker_hands_unstored_results_back(over_http: bool, caplog: Any) -> None:
    """S11, W4: a worker that stops during the outage hands these attempts back, uncounted, and does
    not wait for the store without end."""
    rig = Rig(None if over_http else Store())
    await rig.claim("large", 1)
    rig.end(1, context=LARGE)
    await rig.sender.wait_sent(0.05)
    assert rig.sent[1].outcome is Outcome.HANDED_BACK
    assert rig.sent[1].context is None
    assert len(rig.in_flight) == 0
    assert [record.event for record in caplog.records if hasattr(record, "results")] == [
        "unstored_results_returned"
    ]


async def test_a_lost_attempt_is_not_stored() -> None:
    """W5, S11: the result of an attempt that was lost or revoked meanwhile is dropped, although the
    store is still away."""
    store = Store(refuses=True)
    rig = Rig(store)
    await rig.claim("large", 1)
    rig.end(1, context=LARGE)
    await wait_until(lambda: store.tried)
    rig.in_flight.remove([Fence(1, 0, "s", 0).attempt_id])
    await rig.sender.wait_sent()
    assert not rig.sent
    assert rig.in_flight.room == 2
