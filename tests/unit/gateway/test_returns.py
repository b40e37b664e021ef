"""The return of tasks that their workers never received."""

from __future__ import annotations

import asyncio

from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import Outcome
from penstock.core.completion import Fence
from penstock.errors import KafkaUnavailable
from penstock.gateway import returns as module
from penstock.gateway.returns import Returns

TASKS = [ReadyTask(Fence(number, 0, "s", 0), "t", Context.encode(None), 60_000) for number in (1, 2)]


class Kafka:
    """Takes results once it is available."""

    def __init__(self, outages: int) -> None:
        self.outages = outages
        self.sent = []

    async def send(self, worker, results):
        if self.outages:
            self.outages -= 1
            raise KafkaUnavailable("no broker answers")
        self.sent.append((worker, [(result.fence, result.outcome) for result in results]))


async def test_an_outage_delays_a_return_and_ends_none():
    """S11, T6: otherwise the tasks would wait for their leases, and be charged a loss."""
    kafka = Kafka(outages=2)
    returns = Returns(kafka.send)
    returns.add("w", TASKS)
    returns.add("w", [])
    await wait_until(lambda: kafka.sent, what="the return")
    assert kafka.sent == [("w", [(task.fence, Outcome.HANDED_BACK) for task in TASKS])]


async def test_a_stop_completes_returns_and_gives_up_in_an_outage(monkeypatch, caplog):
    """T6: the leases of the others return them."""
    kafka = Kafka(outages=0)
    returns = Returns(kafka.send)
    returns.add("w", TASKS)
    await returns.close()
    assert len(kafka.sent) == 1
    monkeypatch.setattr(module, "STOP_S", 0.05)
    kafka.outages = 1_000_000
    returns.add("w", TASKS)
    await asyncio.sleep(0)
    await returns.close()
    assert len(kafka.sent) == 1
    assert "return_failed" in [vars(record).get("event") for record in caplog.records]
