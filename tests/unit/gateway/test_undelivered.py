"""The return of tasks that their workers never received."""

from __future__ import annotations

import asyncio

from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import Outcome
from penstock.core.completion import Fence
from penstock.errors import KafkaUnavailable
from penstock.gateway import undelivered as module
from penstock.gateway.undelivered import UndeliveredTasks

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


async def test_tasks_are_returned_after_an_outage():
    """S11, T6: otherwise the tasks would wait for their leases, and be charged a loss."""
    kafka = Kafka(outages=2)
    undelivered = UndeliveredTasks(kafka.send, [])
    undelivered.add("w", TASKS)
    undelivered.add("w", [])
    await wait_until(lambda: kafka.sent, what="the return")
    assert kafka.sent == [("w", [(task.fence, Outcome.HANDED_BACK) for task in TASKS])]


async def test_a_stop_waits_for_kafka_for_a_short_time_only(monkeypatch, caplog):
    """T6: if the process ends, the leases of the others return them."""
    kafka = Kafka(outages=0)
    undelivered = UndeliveredTasks(kafka.send, [])
    undelivered.add("w", TASKS)
    await undelivered.close()
    assert len(kafka.sent) == 1
    monkeypatch.setattr(module, "STOP_S", 0.05)
    kafka.outages = 1_000_000
    undelivered.add("w", TASKS)
    await asyncio.sleep(0)
    await undelivered.close()
    assert len(kafka.sent) == 1
    assert "return_failed" in [vars(record).get("event") for record in caplog.records]


async def test_the_next_gateway_returns_undelivered_tasks(monkeypatch):
    """O2, T6: an outage that loses answers often ends the gateway's producer. The gateway that
    begins again returns the tasks."""
    kafka, kept = Kafka(outages=1_000_000), []
    monkeypatch.setattr(module, "STOP_S", 0.05)
    ended = UndeliveredTasks(kafka.send, kept)
    ended.add("w", TASKS)
    await asyncio.sleep(0)
    await ended.close()
    kafka.outages = 0
    UndeliveredTasks(kafka.send, kept).resume()
    await wait_until(lambda: kafka.sent, what="the return")
    assert kafka.sent == [("w", [(task.fence, Outcome.HANDED_BACK) for task in TASKS])]
    assert kept == []
