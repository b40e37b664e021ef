"""The watch over leases suspects itself before it calls many silent, in time that the test lets pass."""

import asyncio
import dataclasses
import logging
from types import SimpleNamespace

import pytest

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.errors import KafkaUnavailable
from penstock.heartbeats import handlers, reading
from penstock.heartbeats.handlers import SURE_WITHIN_S, Watch
from penstock.heartbeats.reading import Reading
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.postgres.queries import query

PARTITION = 3
LEASE_S = 20.0
SUSPICION = "making sure that it is not us"


class Time:
    """Passes in sleeps only, and no further than it is let."""

    def __init__(self):
        self.now_s = self._until_s = 1_000.0
        self.lag_s = 0.0
        self._more, self._idle = asyncio.Event(), asyncio.Event()
        self.stop = self._idle.set

    async def sleep(self, seconds):
        while self.now_s + seconds > self._until_s:
            self._idle.set()
            await self._more.wait()
        self.now_s += seconds + self.lag_s
        self.lag_s = 0.0
        await asyncio.sleep(0)

    async def go_on(self, seconds):
        """What sleeps wakes until so many seconds later; whoever would sleep longer is left asleep."""
        self._idle.clear()
        self._until_s = self.now_s + seconds
        self._more.set()
        self._more.clear()
        await self._idle.wait()


class Broker:
    """One partition of heartbeats, and how far it has been read."""

    def __init__(self, time):
        self._time = time
        self.end = 0
        self.expected = 0
        self.away = False
        self.asked_s = []
        # Called with how often it was asked, before it answers.
        self.on_asked = lambda times: None

    async def ends(self):
        self.asked_s.append(self._time.now_s)
        self.on_asked(len(self.asked_s))
        if self.away:
            raise KafkaUnavailable("nobody there")
        return {("heartbeats", PARTITION): self.end}


class Database:
    """Knows which leases to restore, and notes whose attempts are about to be ended, and when."""

    def __init__(self, time):
        self._time = time
        self.rows = []
        self.ended_s = {}

    async def fetch(self, statement, *arguments):
        if statement == query("leases.held"):
            return self.rows
        assert statement == query("advance.tallies")
        self.ended_s |= dict.fromkeys(arguments[0], self._time.now_s)
        return []


class Rig:
    def __init__(self, time):
        self.time = time
        self.broker, self.database = Broker(time), Database(time)

        async def unended(_partitions, _watched, _now_s):
            return []

        self.watch = Watch(
            dataclasses.replace(HeartbeatsSettings(), tick_s=1.0),
            self.database,
            publisher=None,
            reading=Reading(self.broker.ends, lambda: {("heartbeats", PARTITION): self.broker.expected}),
            unended=unended,
            lost=None,
            clock=lambda: time.now_s,
            chance=lambda: 0.0,
        )

    async def hold(self, count, lease_s=LEASE_S, first=1):
        """Leases from now on, restored; the worker of each is named after it."""
        self.database.rows = [
            {
                "id": number,
                "step": 0,
                "attempt": 0,
                "worker": f"w{number}",
                "lease_ms": round(lease_s * 1000),
                "lease_partition": PARTITION,
                "max_attempts": None,
            }
            for number in range(first, first + count)
        ]
        await self.watch.assigned(frozenset({PARTITION}))

    async def beat(self, number):
        value = Heartbeat(Kind.BEAT, f"w{number}", 60_000, [(number, 0, 0)]).encode()
        await self.watch.take(SimpleNamespace(value=value, partition=PARTITION, settle=lambda: None))

    @property
    def ended(self):
        return sorted(self.database.ended_s)


@pytest.fixture
async def rig(monkeypatch):
    time = Time()
    for module in (handlers, reading):
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=time.sleep))
    rig = Rig(time)
    running = asyncio.create_task(rig.watch.run())
    running.add_done_callback(lambda _task: time.stop())
    # Until it sleeps for the first time.
    await time.go_on(0)
    yield rig
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "penstock.heartbeats")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("silent", "others", "suspicious"),
    [
        pytest.param(3, 0, False, id="three are few, even of three"),
        pytest.param(4, 0, True, id="four of four"),
        pytest.param(4, 36, False, id="a tenth"),
        pytest.param(4, 35, True, id="more than a tenth"),
    ],
)
async def test_many_expiries_at_once_are_looked_at_twice(rig, said, silent, others, suspicious):
    """H8: few that fall silent are believed; more than a tenth of all at once are not, until the topic was asked
    again. Either way nobody expires before its time, and who is really silent expires within a tick or two."""
    begin_s = rig.time.now_s
    await rig.hold(silent)
    await rig.hold(others, lease_s=1_000, first=101)
    await rig.time.go_on(LEASE_S + 2)
    assert rig.ended == list(range(1, silent + 1))
    [ended_s] = set(rig.database.ended_s.values())
    assert begin_s + LEASE_S <= ended_s <= begin_s + LEASE_S + 1
    assert (SUSPICION in said()) is suspicious
    assert rig.broker.asked_s.count(ended_s) == (2 if suspicious else 1)
    if suspicious:
        assert f"{silent} of {silent + others} leases would expire at once" in said()
        assert f"{silent} leases expire: everything that was said before was read" in said()


async def test_who_is_heard_at_the_second_look_does_not_expire(rig, said):
    """H8: beats that were there and not read yet count; the others, who have said nothing, expire then."""
    await rig.hold(6)
    heard = []

    def write(_times):
        # Once all six are due: beats of four that the first look did not see.
        if SUSPICION in said() and not heard:
            rig.broker.end = 4
            heard.extend(asyncio.create_task(rig.beat(number)) for number in range(1, 5))
            heard[-1].add_done_callback(lambda _task: setattr(rig.broker, "expected", 4))

    rig.broker.on_asked = write
    await rig.time.go_on(LEASE_S + 2)
    assert rig.ended == [5, 6]
    assert "2 leases expire" in said()
    await rig.time.go_on(LEASE_S)
    assert rig.ended == [1, 2, 3, 4, 5, 6], "and what was heard expires a whole timeout later"


@pytest.mark.parametrize("trouble", ["behind", "away"])
async def test_nobody_expires_while_the_second_look_finds_out_nothing(rig, said, trouble):
    """H8: what is there and not read, or a broker that is away, is no silence of the workers'. It looks again later, and
    then they expire."""
    await rig.hold(6)

    def fail(_times):
        if SUSPICION in said():
            rig.broker.end = 1
            rig.broker.away = trouble == "away"

    rig.broker.on_asked = fail
    await rig.time.go_on(LEASE_S + 3 * SURE_WITHIN_S)
    assert SUSPICION in said()
    assert rig.ended == []
    rig.broker.on_asked = lambda _times: None
    rig.broker.away, rig.broker.expected = False, 1
    back_s = rig.time.now_s
    await rig.time.go_on(2)
    assert rig.ended == [1, 2, 3, 4, 5, 6]
    assert min(rig.database.ended_s.values()) > back_s - 1


@pytest.mark.parametrize("trouble", ["behind", "away"])
async def test_nobody_expires_by_a_first_look_that_finds_out_nothing(rig, trouble):
    """H8: also of few; silence counts up to the last asking whose ends were passed."""
    await rig.hold(1)
    rig.broker.end, rig.broker.away = 1, trouble == "away"
    await rig.time.go_on(3 * LEASE_S)
    assert rig.ended == []
    rig.broker.expected, rig.broker.away = 1, False
    await rig.time.go_on(2)
    assert rig.ended == [1]


async def test_what_was_let_off_at_the_first_look_may_be_released_before_the_second(rig, said):
    """H8: a lease that is put back is a lease as any other: its release, or the loss of its partition, ends it."""
    await rig.hold(6)

    def lose(_times):
        if SUSPICION in said():
            rig.watch.revoked(frozenset({PARTITION}))

    rig.broker.on_asked = lose
    await rig.time.go_on(LEASE_S + 3)
    assert SUSPICION in said()
    assert rig.ended == []


async def test_time_in_which_it_stood_still_is_nobodys_silence(rig, said):
    """H8: its own loop stood still for half a lease: every lease lasts as much longer, and the log says so."""
    begin_s, lag_s = rig.time.now_s, LEASE_S / 2
    await rig.hold(2)
    await rig.time.go_on(5)
    rig.time.lag_s = lag_s
    await rig.time.go_on(1)
    assert f"stood still for {lag_s:.1f} s; leases are extended by as much" in said()
    await rig.time.go_on(begin_s + LEASE_S + lag_s - rig.time.now_s - 0.5)
    assert rig.ended == []
    await rig.time.go_on(2)
    assert rig.ended == [1, 2]


async def test_a_loop_that_is_a_little_late_extends_nothing(rig, said):
    """H8: or a busy process would expire nobody; a second is no stall."""
    begin_s = rig.time.now_s
    await rig.hold(1)
    while not rig.ended:
        assert rig.time.now_s < begin_s + 2 * LEASE_S
        rig.time.lag_s = 0.9
        await rig.time.go_on(0.3)
    assert rig.database.ended_s[1] <= begin_s + LEASE_S + 2
    assert "stood still" not in said()
