"""The heartbeat sender: heartbeats in batches, and attempts that are cut off."""

import asyncio

import pytest
from tests.support.waiting import in_time

from penstock.contracts.context import Context
from penstock.contracts.heartbeat import claims_of
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.core.heartbeat_queue import Answer
from penstock.errors import KafkaUnavailable, Throttled
from penstock.worker.heartbeat_sender import CUT_OFF, HeartbeatSender
from penstock.worker.http_transport import HttpPuller
from penstock.worker.in_flight import InFlight
from penstock.worker.pull import Member
from penstock.worker.unclaimed import UnclaimedAttempts


class FakeTransport:
    def __init__(self):
        self.unavailable = False
        self.throttled_s = 0.0
        self.requests = 0
        self.sent = []
        self.limits = {}
        self.answers = {}

    async def try_heartbeat(self, heartbeat):
        self.requests += 1
        if self.throttled_s:
            raise Throttled("too much at once", retry_after_s=self.throttled_s)
        if self.unavailable:
            raise KafkaUnavailable("connection refused")
        self.sent.append((heartbeat.lease_ms, sorted(heartbeat.tasks)))
        self.limits |= dict.fromkeys(heartbeat.tasks, heartbeat.max_attempts)
        return {key: self.answers.get(key, Answer.CONFIRMED) for key in heartbeat.tasks}


def task(number, lease_ms=300_000, stage="s"):
    return ReadyTask(Fence(number, 0, stage, 0), "t", Context.encode(None), lease_ms)


class Rig:
    def __init__(self):
        self.now_s = 0.0
        self.transport = FakeTransport()
        self.lost = []
        self.sender = HeartbeatSender(self.transport, "w", lambda: self.now_s, self.lost.extend)

    def add(self, claimed, heard_s, limits=()):
        self.sender.add(claims_of("w", claimed, dict(limits)), heard_s)

    async def advance(self, until_s, step_s=1.0):
        while self.now_s < until_s:
            self.now_s += step_s
            self.sender.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@pytest.fixture
def rig():
    return Rig()


async def test_beats_of_a_step_are_one_record_for_each_length_of_lease(rig):
    """Beats are batched: 300 attempts do not need 300 records."""
    rig.add([task(number) for number in range(300)], 0)
    rig.add([task(1_000, lease_ms=30_000)], 0)
    await rig.advance(190)
    long = [keys for lease_ms, keys in rig.transport.sent if lease_ms == 300_000]
    assert {key[0] for keys in long for key in keys} == set(range(300))
    # Steps of five seconds, at the required rate.
    assert max(len(keys) for keys in long) <= 5 * 300 / 120 + 1
    assert next(keys for lease_ms, keys in rig.transport.sent if lease_ms == 30_000) == [(1_000, 0, 0)]
    assert rig.lost == []


async def test_a_beat_has_the_attempt_limit_of_its_stage(rig):
    """H8: a beat replaces a lost claim, so it has the same fields."""
    rig.add([task(1, stage="once"), task(2)], 0, {"once": 1})
    await rig.advance(120)
    assert rig.transport.limits == {(1, 0, 0): 1, (2, 0, 0): None}


async def test_attempts_are_cut_off_before_their_lease_ends(rig):
    """W6, H6: a shorter outage has no effect; at 0.8 of the lease the attempts are cut off."""
    rig.add([task(1)], 0)
    await rig.advance(100)
    rig.transport.unavailable = True
    await rig.advance(250)
    rig.transport.unavailable = False
    await rig.advance(400)
    assert rig.lost == []
    rig.transport.unavailable = True
    heard_s = rig.now_s
    while not rig.lost:
        await rig.advance(rig.now_s + 1)
    assert rig.now_s - heard_s <= CUT_OFF * 300 + 1
    assert rig.lost == [(1, 0, 0)]
    rig.transport.unavailable, rig.transport.sent = False, []
    await rig.advance(rig.now_s + 400)
    assert rig.transport.sent == [], "no beats of attempts that were cut off"


async def test_attempts_can_be_cut_off_between_steps(rig):
    """W6: after a stall, overdue attempts are cut off before their results are sent; others
    stay."""
    rig.add([task(1), task(2, lease_ms=600_000), task(3)], 0)
    rig.now_s = CUT_OFF * 300
    rig.sender.drop_cut_off([(1, 0, 0), (2, 0, 0), (99, 0, 0)])
    assert rig.lost == [(1, 0, 0)]
    rig.sender.step()
    assert rig.lost == [(1, 0, 0), (3, 0, 0)]


async def test_gone_attempts_are_dropped_and_others_beaten(rig):
    """H3: an attempt that is gone ends its handler; a beat with an unknown error is retried."""
    rig.add([task(1), task(2), task(3)], 0)
    rig.transport.answers = {(1, 0, 0): Answer.GONE, (2, 0, 0): Answer.UNKNOWN}
    await rig.advance(100)
    assert rig.lost == [(1, 0, 0)]
    beaten = [key[0] for _lease_ms, keys in rig.transport.sent for key in keys]
    assert (beaten.count(1), beaten.count(3)) == (1, 1)
    assert beaten.count(2) == 4


async def test_removed_attempts_are_not_beaten(rig):
    """H1: only running attempts are beaten."""
    rig.add([task(1), task(2)], 0)
    rig.sender.remove([(1, 0, 0)])
    await rig.advance(200)
    assert {key[0] for _lease_ms, keys in rig.transport.sent for key in keys} == {2}


class TaskSource:
    """A source without tasks, for Kafka and the gateway, which records the requested numbers."""

    def __init__(self):
        self.requests = []

    async def wait_fetched(self, _timeout_s):
        return True

    def fetched_since(self, _age_s, _now_s):
        return []

    async def getmany(self, timeout_ms, max_records):
        self.requests.append(max_records)
        return {}

    async def post(self, _path, body, _headers=None):
        self.requests.append(body["max"])
        return {"tasks": []}, 0.0


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("freed_by", ["reported", "cut off", "gone"])
async def test_no_task_is_pulled_beyond_the_heartbeat_capacity(rig, over_http, freed_by):
    """H2: a puller waits until the sender and the attempts in flight have room, and pulls no more
    than that."""
    lease_ms = 1
    rig.add([task(0, lease_ms)], 0)
    full = 1 + rig.sender.room
    rig.add([task(number, lease_ms) for number in range(1, full)], 0)
    assert rig.sender.room == 0
    source, in_flight = TaskSource(), InFlight(10_000, lambda: rig.sender.room)
    if over_http:
        pulling = asyncio.ensure_future(
            HttpPuller(source, "t", in_flight, rig.sender, "w", print, {})._pull()
        )
    else:
        unclaimed = UnclaimedAttempts(rig.transport, rig.sender, "w", {}, lambda: rig.now_s)
        pulling = asyncio.ensure_future(Member(source, "t", in_flight, unclaimed, print)._pull())
    for _ in range(10):
        await asyncio.sleep(0)
    assert source.requests == []
    keys = [(number, 0, 0) for number in range(full)]
    if freed_by == "reported":
        rig.sender.remove(keys[:3])
    elif freed_by == "cut off":
        rig.now_s = 1
        rig.sender.drop_cut_off(keys[:3])
    else:
        rig.transport.answers = dict.fromkeys(keys, Answer.GONE)
        await rig.advance(lease_ms / 1000, step_s=lease_ms / 1000 / 30)
    # The platform client removes them here after the sender has.
    in_flight.remove(keys[:3])
    await in_time(pulling)
    [pulled] = source.requests
    assert 0 < pulled <= rig.sender.room


async def test_throttled_beats_wait_for_retry_after_and_go_first(rig):
    """H3: no beat is sent before Retry-After has passed, for any lease; then throttled beats are
    first."""
    rig.add([task(1), task(2, lease_ms=350_000)], 0)
    await rig.advance(59)
    rig.transport.throttled_s = 20.0
    await rig.advance(70)
    requests = rig.transport.requests
    assert requests == 1
    rig.transport.throttled_s = 0.0
    await rig.advance(77)
    assert (rig.transport.requests, rig.transport.sent) == (requests, [])
    await rig.advance(90)
    assert {keys[0][0] for _lease_ms, keys in rig.transport.sent} == {1, 2}
    assert rig.lost == []


async def test_a_long_retry_after_does_not_cost_leases(rig):
    """H3: beats wait for at most half a cycle, so that a lease survives an excessive
    Retry-After."""
    rig.add([task(1)], 0)
    rig.transport.throttled_s = 100_000.0
    await rig.advance(70)
    rig.transport.throttled_s = 0.0
    await rig.advance(200)
    assert rig.transport.sent
    assert rig.lost == []
