"""Attempts that run before they are claimed."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import CHOSEN
from penstock.core.completion import Fence
from penstock.core.early_start import EarlyStart
from penstock.errors import KafkaUnavailable
from penstock.worker.heartbeat_sender import HeartbeatSender
from penstock.worker.unclaimed import UnclaimedAttempts


def task(number, *, lease_ms=60_000):
    return ReadyTask(Fence(number, 0, "s", 0), "t", Context.encode(None), lease_ms)


class Transport:
    """Stores claims, unless `unavailable` is set."""

    def __init__(self):
        self.unavailable = False
        self.tried = asyncio.Event()
        self.claims = []

    async def try_heartbeat(self, heartbeat):
        self.tried.set()
        if self.unavailable:
            raise KafkaUnavailable("away")
        self.claims.append([attempt_id.task_id for attempt_id in heartbeat.tasks])
        return {}


class Rig:
    """Unclaimed attempts on a clock that moves with the loop."""

    def __init__(self, **policy):
        clock = asyncio.get_running_loop().time
        self.transport, self.lost = Transport(), []
        self.heartbeats = HeartbeatSender(self.transport, "w", clock, self.lost.append)
        self.waiting = set()
        self.attempts = UnclaimedAttempts(
            self.transport,
            self.heartbeats,
            "w",
            {"t": {}},
            clock,
            self.waiting.__contains__,
            EarlyStart(**policy),
        )


@pytest.fixture
async def rig():
    return Rig()


@asynccontextmanager
async def claiming(rig):
    """Claims what lasts, for the time of a block."""
    running = asyncio.ensure_future(rig.attempts.run())
    try:
        yield
    finally:
        running.cancel()


async def test_attempts_that_ended_are_not_claimed(rig):
    """W3: a claim names only attempts that still run. An attempt that ended before has no lease."""
    tasks = [task(1), task(2)]
    rig.attempts.add(tasks)
    assert rig.attempts.end([(1, 0, 0)]) == {(1, 0, 0)}
    await rig.attempts.claim([ready.fence.attempt_id for ready in tasks])
    assert rig.transport.claims == [[2]]
    assert (2, 0, 0) not in rig.attempts
    assert rig.attempts.end([(2, 0, 0)]) == set(), "its lease is to be ended"


async def test_a_claim_that_is_tried_again_leaves_out_what_ended_meanwhile(rig):
    """W3: no claim follows the result and the end of the lease. An attempt whose claim was tried
    may have a lease, which is ended."""
    rig.transport.unavailable = True
    rig.attempts.add([task(1), task(2)])
    claiming = asyncio.ensure_future(rig.attempts.claim([(1, 0, 0), (2, 0, 0)]))
    await rig.transport.tried.wait()
    assert rig.attempts.end([(1, 0, 0)]) == set()
    rig.transport.unavailable = False
    await claiming
    assert rig.transport.claims == [[2]]


async def test_what_lasts_is_claimed():
    """W3: an attempt is claimed once it lasts longer than the time that it may run unclaimed."""
    rig = Rig(claim_after_s=0.0)
    running = asyncio.ensure_future(rig.attempts.run())
    for number in (1, 2):
        rig.transport.tried.clear()
        rig.attempts.add([task(number)])
        await rig.transport.tried.wait()
    running.cancel()
    assert rig.transport.claims == [[1], [2]]


async def test_an_attempt_without_a_claim_is_cut_off_like_any_other(rig):
    """W6: a worker that cannot claim stops the attempt before its lease would end. Its record must
    be read again, so it stays unsettled."""
    rig.transport.unavailable = True
    rig.attempts.add([task(1, lease_ms=1)])
    claiming = asyncio.ensure_future(rig.attempts.claim([(1, 0, 0)]))
    await rig.transport.tried.wait()
    while not rig.lost:
        rig.heartbeats.drop_cut_off([(1, 0, 0)])
        await asyncio.sleep(0)
    [lost] = rig.lost
    rig.attempts.lose(lost)
    assert rig.attempts.lost([(1, 0, 0)]) == [(1, 0, 0)]
    rig.transport.unavailable = False
    await claiming
    assert rig.transport.claims == []
    assert (1, 0, 0) in rig.attempts


async def test_an_attempt_with_which_the_worker_went_on_is_forgotten_when_it_is_cut_off(rig):
    """W6: no record brings it back to this worker, so nothing waits for one."""
    follows = dataclasses.replace(task(1), fence=Fence(1, 0, "s", CHOSEN))
    attempt_id = follows.attempt_id
    rig.attempts.add([follows])
    rig.attempts.lose([attempt_id])
    assert attempt_id not in rig.attempts
    assert rig.attempts.lost([attempt_id]) == []
    await rig.attempts.claim([attempt_id])
    assert rig.transport.claims == []


async def test_an_attempt_that_waits_is_not_claimed_with_those_that_run():
    """W3, W8: an attempt that waits for a handler has not begun, so no claim says that it has. It
    is claimed soon after it begins."""
    rig = Rig(claim_waiting_after_s=600.0)
    rig.waiting.add((1, 0, 0))
    rig.attempts.add([task(1), task(2)])
    async with claiming(rig):
        await wait_until(lambda: rig.transport.claims)
        assert rig.transport.claims == [[2]]
        rig.waiting.clear()
        await wait_until(lambda: len(rig.transport.claims) == 2)
    assert rig.transport.claims == [[2], [1]]


async def test_an_attempt_that_waits_for_long_is_claimed():
    """W3: otherwise the offsets behind it could not be committed."""
    rig = Rig(claim_waiting_after_s=0.0)
    rig.waiting.add((1, 0, 0))
    rig.attempts.add([task(1)])
    async with claiming(rig):
        await wait_until(lambda: rig.transport.claims == [[1]])
