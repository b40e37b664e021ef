"""A worker without Kafka: from when it counts its leases."""

import asyncio

import pytest

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.worker.hand import Hand
from penstock.worker.over_http import HttpPuller

READY = ReadyTask(Fence(1, 0, "s", 0), "t", Context.encode(None), 60_000)


class Gateway:
    def __init__(self, body):
        self.body = {"tasks": [READY.to_wire()], **body}
        self.answered = False
        self.asked_s = self.arrived_s = 0.0

    async def post(self, path, body):
        if self.answered:
            await asyncio.Event().wait()
        self.answered = True
        self.asked_s = asyncio.get_running_loop().time()
        # A long poll.
        self.arrived_s = self.asked_s + 10
        return self.body, self.arrived_s


class Heart:
    room = 10

    def __init__(self):
        self.heard_s = asyncio.get_running_loop().create_future()

    def take(self, claimed, heard_s):
        self.heard_s.set_result(heard_s)


@pytest.mark.parametrize(
    ("body", "before_s"),
    [
        pytest.param({"claimed_ms_ago": 1_500}, 1.5, id="since the claim"),
        pytest.param({}, 0.0, id="a gateway that does not say"),
        pytest.param({"claimed_ms_ago": 3_600_000}, 10.0, id="not before it was asked"),
    ],
)
async def test_a_lease_counts_from_its_claim(body, before_s):
    """W6: the platform counts from the claim, so a worker that counts from the answer would stop too late."""
    gateway, heart = Gateway(body), Heart()
    puller = HttpPuller(gateway, "t", Hand(10), heart, "w", lambda _claimed: None)
    pulling = asyncio.create_task(puller.run())
    heard_s = await asyncio.wait_for(heart.heard_s, 5)
    pulling.cancel()
    assert heard_s == pytest.approx(gateway.arrived_s - before_s, abs=0.5)
