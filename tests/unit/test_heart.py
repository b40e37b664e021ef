"""The worker's heart: beats in batches, and gives up what the platform does not hear of."""

import asyncio

import pytest

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.beats import Answer
from penstock.core.completion import Fence
from penstock.errors import KafkaUnavailable, Throttled
from penstock.worker import WorkerSettings
from penstock.worker.hand import Hand, claims_of
from penstock.worker.heart import CUT_OFF, Heart
from penstock.worker.over_http import HttpPuller
from penstock.worker.pull import Puller


class Link:
    def __init__(self):
        self.away = False
        self.busy_for_s = 0.0
        self.asked = 0
        self.sent = []
        self.limits = {}
        self.answers = {}

    async def try_heartbeat(self, heartbeat):
        self.asked += 1
        if self.busy_for_s:
            raise Throttled("too much at once", retry_after_s=self.busy_for_s)
        if self.away:
            raise KafkaUnavailable("nobody there")
        self.sent.append((heartbeat.lease_ms, sorted(heartbeat.tasks)))
        self.limits |= dict.fromkeys(heartbeat.tasks, heartbeat.max_attempts)
        return {key: self.answers.get(key, Answer.HEARD) for key in heartbeat.tasks}


def task(number, lease_ms=300_000, stage="s"):
    return ReadyTask(Fence(number, 0, stage, 0), "t", Context.encode(None), lease_ms)


class Rig:
    def __init__(self):
        self.now_s = 0.0
        self.link = Link()
        self.given_up = []
        self.heart = Heart(self.link, "w", lambda: self.now_s, self.given_up.extend)

    def take(self, claimed, heard_s, limits=()):
        self.heart.take(claims_of("w", claimed, dict(limits)), heard_s)

    async def go_on(self, until_s, step_s=1.0):
        while self.now_s < until_s:
            self.now_s += step_s
            self.heart.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@pytest.fixture
def rig():
    return Rig()


async def test_beats_of_a_step_are_one_record_for_each_length_of_lease(rig):
    """Batch on the hot path: 300 attempts are not 300 records."""
    rig.take([task(number) for number in range(300)], 0)
    rig.take([task(1_000, lease_ms=30_000)], 0)
    await rig.go_on(190)
    long = [keys for lease_ms, keys in rig.link.sent if lease_ms == 300_000]
    assert {key[0] for keys in long for key in keys} == set(range(300))
    # In steps of five seconds, at the rate that they need.
    assert max(len(keys) for keys in long) <= 5 * 300 / 120 + 1
    assert next(keys for lease_ms, keys in rig.link.sent if lease_ms == 30_000) == [(1_000, 0, 0)]
    assert rig.given_up == []


async def test_a_beat_says_how_often_its_stage_may_be_tried(rig):
    """H8: a beat stands for a claim that was lost, so it says the same."""
    rig.take([task(1, stage="once"), task(2)], 0, {"once": 1})
    await rig.go_on(120)
    assert rig.link.limits == {(1, 0, 0): 1, (2, 0, 0): None}


async def test_cut_off_it_gives_up_before_the_lease_ends_and_not_after_a_short_outage(rig):
    """W6, H6: a broker that is away for less costs nothing; at 0.8 of the lease the attempts are given up."""
    rig.take([task(1)], 0)
    await rig.go_on(100)
    rig.link.away = True
    await rig.go_on(250)
    rig.link.away = False
    await rig.go_on(400)
    assert rig.given_up == []
    rig.link.away = True
    heard_s = rig.now_s
    while not rig.given_up:
        await rig.go_on(rig.now_s + 1)
    assert rig.now_s - heard_s <= CUT_OFF * 300 + 1
    assert rig.given_up == [(1, 0, 0)]
    rig.link.away, rig.link.sent = False, []
    await rig.go_on(rig.now_s + 400)
    assert rig.link.sent == [], "what was given up is not beaten any more"


async def test_who_speaks_of_what_is_cut_off_finds_it_given_up_before_the_next_step(rig):
    """W6: after a standstill nobody is to be faster than the cut-off; what was heard of in time stays."""
    rig.take([task(1), task(2, lease_ms=600_000), task(3)], 0)
    rig.now_s = CUT_OFF * 300
    rig.heart.cut_off([(1, 0, 0), (2, 0, 0), (99, 0, 0)])
    assert rig.given_up == [(1, 0, 0)]
    rig.heart.step()
    assert rig.given_up == [(1, 0, 0), (3, 0, 0)]


async def test_what_is_gone_is_given_up_and_the_others_are_beaten_on(rig):
    """H3: gone or cancelled ends the handler; an unknown error is tried again."""
    rig.take([task(1), task(2), task(3)], 0)
    rig.link.answers = {(1, 0, 0): Answer.GONE, (2, 0, 0): Answer.UNKNOWN}
    await rig.go_on(100)
    assert rig.given_up == [(1, 0, 0)]
    beaten = [key[0] for _lease_ms, keys in rig.link.sent for key in keys]
    assert (beaten.count(1), beaten.count(3)) == (1, 1)
    assert beaten.count(2) == 4


async def test_what_was_let_go_is_not_beaten(rig):
    """H1: only what still runs."""
    rig.take([task(1), task(2)], 0)
    rig.heart.let_go([(1, 0, 0)])
    await rig.go_on(200)
    assert {key[0] for _lease_ms, keys in rig.link.sent for key in keys} == {2}


class Shop:
    """Where tasks are had, Kafka's way and the gateway's: it has none, but writes down how many it was asked for."""

    def __init__(self):
        self.asked = []

    async def getmany(self, timeout_ms, max_records):
        self.asked.append(max_records)
        return {}

    async def post(self, _path, body):
        self.asked.append(body["max"])
        return {"tasks": []}, 0.0


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("how", ["reported", "given up", "gone"])
async def test_nothing_is_pulled_while_no_more_can_be_kept_alive(rig, over_http, how):
    """H2: a full heart waits as a full hand does, and then takes no more than there is room for, however it came."""
    lease_ms = 1
    rig.take([task(0, lease_ms)], 0)
    full = 1 + rig.heart.room
    rig.take([task(number, lease_ms) for number in range(1, full)], 0)
    assert rig.heart.room == 0
    shop, hand = Shop(), Hand(10_000)
    settings = WorkerSettings(objects="memory:///")
    if over_http:
        pulling = asyncio.ensure_future(HttpPuller(shop, "t", hand, rig.heart, "w", print, {})._asked())
    else:
        puller = Puller(settings, "t", rig.link, hand, rig.heart, "w", print, {})
        pulling = asyncio.ensure_future(puller._pull(shop))
    for _ in range(10):
        await asyncio.sleep(0)
    assert shop.asked == []
    keys = [(number, 0, 0) for number in range(full)]
    if how == "reported":
        rig.heart.let_go(keys[:3])
    elif how == "given up":
        rig.now_s = 1
        rig.heart.cut_off(keys[:3])
    else:
        rig.link.answers = dict.fromkeys(keys, Answer.GONE)
        await rig.go_on(lease_ms / 1000, step_s=lease_ms / 1000 / 30)
    await asyncio.wait_for(pulling, 5)
    [most] = shop.asked
    assert 0 < most <= rig.heart.room


async def test_throttled_beats_wait_as_long_as_was_asked_and_are_the_first_then(rig):
    """H3: nothing is sent before Retry-After has passed, whatever the lease; then what was throttled comes first."""
    rig.take([task(1), task(2, lease_ms=350_000)], 0)
    await rig.go_on(59)
    rig.link.busy_for_s = 20.0
    await rig.go_on(70)
    asked = rig.link.asked
    assert asked == 1
    rig.link.busy_for_s = 0.0
    await rig.go_on(77)
    assert (rig.link.asked, rig.link.sent) == (asked, [])
    await rig.go_on(90)
    assert {keys[0][0] for _lease_ms, keys in rig.link.sent} == {1, 2}
    assert rig.given_up == []


async def test_who_is_asked_for_silence_for_ever_does_not_lose_its_leases_by_obedience(rig):
    """H3: held back for half a cycle at most, so that a lease outlasts an absurd Retry-After."""
    rig.take([task(1)], 0)
    rig.link.busy_for_s = 100_000.0
    await rig.go_on(70)
    rig.link.busy_for_s = 0.0
    await rig.go_on(200)
    assert rig.link.sent
    assert rig.given_up == []
