"""The lease tracker verifies its own reading before a mass expiry, in time that the test lets
pass."""

import asyncio
import dataclasses
import logging
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace

import pytest

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.core.attempt import AttemptId
from penstock.errors import KafkaUnavailable
from penstock.heartbeats import lease_tracker, read_watermark
from penstock.heartbeats.lease_tracker import VERIFY_WITHIN_S, LeaseTracker
from penstock.heartbeats.read_watermark import ResultsWatermark, WatermarkReader
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.heartbeats.unwatched import Recount
from penstock.metrics import LEASE_OVERDUE_SECONDS
from penstock.postgres.queries import query

PARTITION = 3
LEASE_S = 20.0


class Time:
    """A clock that only advances in sleeps, up to a limit that the test sets."""

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

    async def advance(self, seconds):
        """Advances the clock by `seconds` and ends all sleeps until then."""
        self._idle.clear()
        self._until_s = self.now_s + seconds
        self._more.set()
        self._more.clear()
        await self._idle.wait()


class Broker:
    """One partition of heartbeats, and its read offset."""

    def __init__(self, time):
        self._time = time
        self.end = 0
        self.expected = 0
        self.unavailable = False
        self.requests_s = []
        # Called before each answer with the number of requests so far.
        self.on_request = lambda times: None

    async def ends(self):
        self.requests_s.append(self._time.now_s)
        self.on_request(len(self.requests_s))
        if self.unavailable:
            raise KafkaUnavailable("connection refused")
        return {("heartbeats", PARTITION): self.end}


class StageProcessor:
    """One partition of results, and the committed offset."""

    def __init__(self):
        self.end = self.committed_offset = 0
        self.unavailable = False

    async def ends(self):
        if self.unavailable:
            raise KafkaUnavailable("connection refused")
        return {0: 0, 1: self.end}

    async def committed(self, _ends):
        return {0: 0, 1: self.committed_offset}


class Database:
    """Has the leases to restore, and records workers whose attempts are about to end, with the
    time."""

    def __init__(self, time):
        self._time = time
        self.rows = []
        self.ended_s = {}

    @asynccontextmanager
    async def acquire(self):
        yield self

    def transaction(self, **_options):
        return nullcontext()

    async def cursor(self, statement, *_arguments):
        assert statement == query("leases.held")
        rows = list(self.rows)

        async def fetch(count):
            taken, rows[:] = rows[:count], rows[count:]
            return taken

        return SimpleNamespace(fetch=fetch)

    async def fetch(self, statement, *arguments):
        assert statement == query("advance.retry_states")
        self.ended_s |= dict.fromkeys(arguments[0], self._time.now_s)
        return []


class Rig:
    def __init__(self, time):
        self.time = time
        self.broker, self.database = Broker(time), Database(time)
        self.stages = StageProcessor()

        async def find_unwatched(_partitions, _is_watched, _now_s):
            return Recount(list(self.leases._wheel), [])

        self.leases = LeaseTracker(
            dataclasses.replace(HeartbeatsSettings(), tick_s=1.0),
            self.database,
            publisher=SimpleNamespace(enqueue=lambda _entry: None),
            watermark=WatermarkReader(
                self.broker.ends, lambda: {("heartbeats", PARTITION): self.broker.expected}
            ),
            results=ResultsWatermark(self.stages),
            find_unwatched=find_unwatched,
            evict=None,
            clock=lambda: time.now_s,
            chance=lambda: 0.0,
        )

    async def hold(self, count, lease_s=LEASE_S, first=1):
        """Restores leases that start now; each has its own worker."""
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
        await self.leases.assigned(frozenset({PARTITION}))

    async def beat(self, number):
        value = Heartbeat(Kind.BEAT, f"w{number}", 60_000, [AttemptId(number, 0, 0)]).encode()
        await self.leases.take(
            SimpleNamespace(value=value, partition=PARTITION, header=lambda _name: None, settle=lambda: None)
        )

    @property
    def ended(self):
        return sorted(self.database.ended_s)


@pytest.fixture
async def rig(monkeypatch):
    time = Time()
    for module in (lease_tracker, read_watermark):
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=time.sleep))
    rig = Rig(time)
    running = asyncio.create_task(rig.leases.run())
    running.add_done_callback(lambda _task: time.stop())
    # Wait for the first sleep.
    await time.advance(0)
    yield rig
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()


@pytest.fixture
def logged(caplog):
    """The fields of the log records with one event."""
    caplog.set_level(logging.WARNING, "penstock.heartbeats")
    return lambda event: [vars(record) for record in caplog.records if vars(record).get("event") == event]


@pytest.mark.parametrize(
    ("silent", "others", "suspicious"),
    [
        pytest.param(3, 0, False, id="three are few, even of three"),
        pytest.param(4, 0, True, id="four of four"),
        pytest.param(4, 36, False, id="a tenth"),
        pytest.param(4, 35, True, id="more than a tenth"),
    ],
)
async def test_a_mass_expiry_is_verified(rig, logged, silent, others, suspicious):
    """H8: a few leases expire at once, but more than a tenth of all only after a verification. In
    both cases no lease expires early, and a lease without heartbeats expires within two ticks."""
    begin_s = rig.time.now_s
    await rig.hold(silent)
    await rig.hold(others, lease_s=1_000, first=101)
    await rig.time.advance(LEASE_S + 2)
    assert rig.ended == list(range(1, silent + 1))
    [ended_s] = set(rig.database.ended_s.values())
    assert begin_s + LEASE_S <= ended_s <= begin_s + LEASE_S + 1
    checks = [(one["expiring"], one["leases"]) for one in logged("mass_expiry_checked")]
    assert checks == ([(silent, silent + others)] if suspicious else [])
    assert rig.broker.requests_s.count(ended_s) == (2 if suspicious else 1)
    assert [one["expired"] for one in logged("mass_expiry_verified")] == ([silent] if suspicious else [])


async def test_a_lease_with_a_beat_that_was_not_read_yet_does_not_expire(rig, logged):
    """H8: beats that are not read yet count; leases without a beat expire."""
    await rig.hold(6)
    beats = []

    def write(_times):
        # When all six are due: beats of four tasks, written after the first request.
        if logged("mass_expiry_checked") and not beats:
            rig.broker.end = 4
            beats.extend(asyncio.create_task(rig.beat(number)) for number in range(1, 5))
            beats[-1].add_done_callback(lambda _task: setattr(rig.broker, "expected", 4))

    rig.broker.on_request = write
    await rig.time.advance(LEASE_S + 2)
    assert rig.ended == [5, 6]
    assert [one["expired"] for one in logged("mass_expiry_verified")] == [2]
    await rig.time.advance(LEASE_S)
    assert rig.ended == [1, 2, 3, 4, 5, 6], "the others expire a whole timeout after their beat"


@pytest.mark.parametrize("failure", ["behind", "away"])
async def test_no_lease_expires_while_the_verification_is_undecided(rig, logged, failure):
    """H8: while records are not read, or the broker is unavailable, no lease expires. A later
    verification lets them expire."""
    await rig.hold(6)

    def fail(_times):
        if logged("mass_expiry_checked"):
            rig.broker.end = 1
            rig.broker.unavailable = failure == "away"

    rig.broker.on_request = fail
    await rig.time.advance(LEASE_S + 3 * VERIFY_WITHIN_S)
    assert logged("mass_expiry_checked")
    assert rig.ended == []
    rig.broker.on_request = lambda _times: None
    rig.broker.unavailable, rig.broker.expected = False, 1
    back_s = rig.time.now_s
    await rig.time.advance(2)
    assert rig.ended == [1, 2, 3, 4, 5, 6]
    assert min(rig.database.ended_s.values()) > back_s - 1


@pytest.mark.parametrize("failure", ["behind", "away"])
async def test_no_lease_expires_while_the_watermark_is_unknown(rig, failure):
    """H8: without a watermark no lease expires, not even a few."""
    await rig.hold(1)
    rig.broker.end, rig.broker.unavailable = 1, failure == "away"
    await rig.time.advance(3 * LEASE_S)
    assert rig.ended == []
    rig.broker.expected, rig.broker.unavailable = 1, False
    await rig.time.advance(2)
    assert rig.ended == [1]


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("failure", ["behind", "away"])
async def test_no_lease_expires_before_the_results_are_read(rig, failure, count):
    """H8, H10: a lease expires only after the stage processor has committed all results that were
    written before its deadline. Later results delay nothing."""
    await rig.hold(count)
    rig.stages.end, rig.stages.unavailable = 3, failure == "away"
    await rig.time.advance(3 * LEASE_S)
    assert rig.ended == []
    [overdue] = [one for one in rig.leases.samples() if one.metric is LEASE_OVERDUE_SECONDS]
    assert 2 * LEASE_S - 2 <= overdue.value <= 2 * LEASE_S
    rig.stages.committed_offset, rig.stages.unavailable = 3, False
    await rig.time.advance(2)
    assert rig.ended == list(range(1, count + 1))
    await rig.hold(count, first=101)
    for end in range(4, 100):
        # Always one result behind.
        rig.stages.end, rig.stages.committed_offset = end, end - 1
        await rig.time.advance(0.5)
    assert len(rig.ended) == 2 * count


async def test_a_lease_may_end_before_the_verification(rig, logged):
    """H8: the loss of its partition also ends a lease that waits for the verification."""
    await rig.hold(6)

    def lose(_times):
        if logged("mass_expiry_checked"):
            rig.leases.revoked(frozenset({PARTITION}))

    rig.broker.on_request = lose
    await rig.time.advance(LEASE_S + 3)
    assert logged("mass_expiry_checked")
    assert rig.ended == []


async def test_a_stall_of_this_process_extends_all_leases(rig, logged):
    """H8: a stall of the event loop for half a lease extends every lease by that time, and is
    logged."""
    begin_s, lag_s = rig.time.now_s, LEASE_S / 2
    await rig.hold(2)
    await rig.time.advance(5)
    rig.time.lag_s = lag_s
    await rig.time.advance(1)
    assert [one["stalled_s"] for one in logged("leases_extended")] == [lag_s]
    await rig.time.advance(begin_s + LEASE_S + lag_s - rig.time.now_s - 0.5)
    assert rig.ended == []
    await rig.time.advance(2)
    assert rig.ended == [1, 2]


async def test_a_short_delay_of_the_loop_extends_no_lease(rig, logged):
    """H8: a delay of a second is no stall; otherwise a busy process would expire no lease."""
    begin_s = rig.time.now_s
    await rig.hold(1)
    while not rig.ended:
        assert rig.time.now_s < begin_s + 2 * LEASE_S
        rig.time.lag_s = 0.9
        await rig.time.advance(0.3)
    assert rig.database.ended_s[1] <= begin_s + LEASE_S + 2
    assert logged("leases_extended") == []
