"""The lease wheel, compared with a naive model."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.memory import growth_bytes

from penstock.core.attempt import AttemptId
from penstock.core.leases import Lease, LeaseWheel
from penstock.core.read_watermark import ReadWatermark

KEYS = st.tuples(st.integers(1, 3), st.just(0), st.integers(0, 1))
WORKERS = st.sampled_from(["a", "b"])


class WheelMachine(RuleBasedStateMachine):
    """H8, H9: a lease expires after its timeout without a heartbeat, at most a tick late, for every
    sequence of claims, beats and releases."""

    @initialize(tick=st.sampled_from([0.5, 1.0, 7.0]))
    def begin(self, tick):
        self.tick = tick
        self.now = 1000.0
        self.wheel = LeaseWheel(tick)
        self.model = {}

    @rule(
        key=KEYS,
        worker=WORKERS,
        timeout=st.sampled_from([1.0, 3.0, 30.0, 300.0]),
        partition=st.integers(0, 2),
    )
    def grant(self, key, worker, timeout, partition):
        self.wheel.grant(Lease(key, worker, timeout, self.now, partition))
        self.model[key] = [worker, timeout, self.now, partition]

    @rule()
    def beat_all(self):
        for key, (worker, *_others) in list(self.model.items()):
            self.beat(key, worker)

    @rule(key=KEYS, worker=WORKERS)
    def beat(self, key, worker):
        held = key in self.model and self.model[key][0] == worker
        assert self.wheel.beat(key, worker, self.now) is held
        if held:
            self.model[key][2] = self.now

    @rule(key=KEYS, worker=WORKERS)
    def end(self, key, worker):
        held = key in self.model and self.model[key][0] == worker
        assert self.wheel.end(key, worker) is held
        if held:
            del self.model[key]

    @rule(partition=st.integers(0, 2))
    def drop(self, partition):
        dropped = [key for key, held in self.model.items() if held[3] == partition]
        assert self.wheel.drop(frozenset({partition})) == len(dropped)
        for key in dropped:
            del self.model[key]

    # About two thirds of a timeout, so that a beat between two of them decides.
    @rule(seconds=st.sampled_from([0.7, 2.0, 20.0, 200.0]) | st.floats(0, 400))
    def pass_time(self, seconds):
        self.now += seconds
        expired = self.wheel.expired(self.now)
        for lease in expired:
            _worker, timeout, seen, _partition = self.model.pop(lease.attempt_id)
            assert seen + timeout <= self.now, "a false expiry"
        assert [lease.deadline_s for lease in expired] == sorted(lease.deadline_s for lease in expired)
        for _worker, timeout, seen, _partition in self.model.values():
            assert seen + timeout > self.now - 2 * self.tick, "an expiry is more than a tick late"

    @invariant()
    def same_leases(self):
        if hasattr(self, "model"):
            assert {lease.attempt_id for lease in self.wheel} == set(self.model)


TestWheel = WheelMachine.TestCase
TestWheel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(beats=st.lists(st.floats(0, 290), max_size=20))
def test_a_lease_that_is_beaten_in_time_never_expires(beats):
    """H8: a lease expires by the time since its last heartbeat, not by a count of checks."""
    wheel = LeaseWheel(1.0)
    now = 0.0
    wheel.grant(Lease(AttemptId(1, 0, 0), "a", 300.0, now, 0))
    for pause in beats:
        now += pause
        assert wheel.expired(now) == []
        assert wheel.beat(AttemptId(1, 0, 0), "a", now)
    assert len(wheel.expired(now + 302)) == 1


@given(
    beats=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 2)), max_size=30),
    checks=st.lists(
        st.tuples(st.floats(0.1, 30), st.dictionaries(st.integers(0, 2), st.floats(0, 60))), max_size=15
    ),
)
def test_no_lease_expires_beyond_the_read_watermark(beats, checks):
    """H8: time for which the processor has not read all heartbeats does not count."""
    wheel = LeaseWheel(1.0)
    held = {}
    for number, (seen, partition) in enumerate(beats):
        held[number, 0, 0] = (seen, partition)
        wheel.grant(Lease(AttemptId(number, 0, 0), "w", 10.0, seen, partition))
    now = 100.0
    for seconds, behind in checks:
        now += seconds
        until = {partition: now - lag for partition, lag in behind.items()}
        for lease in wheel.expired(now, until):
            seen, partition = held.pop(lease.attempt_id)
            assert seen + 10.0 <= until[partition]
    expired = {lease.attempt_id for lease in wheel.expired(now + 200, dict.fromkeys(range(3), now + 200))}
    assert expired == set(held), "a postponed expiry comes later"


@given(
    steps=st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 1), st.integers(0, 50)),
            st.dictionaries(st.integers(0, 1), st.integers(0, 50)),
        ),
        max_size=20,
    )
)
def test_the_watermark_is_the_last_mark_that_was_passed(steps):
    """H8: against a naive model of marks and positions."""
    watermark = ReadWatermark()
    marks = []
    for at, (ends, expected) in enumerate(steps):
        watermark.asked(ends, at)
        watermark.read(expected)
        marks = [(time, partition) for time, partition in marks if partition in expected]
        marks += [(at, partition) for partition in ends if partition in expected]
        for partition, until in watermark.until_s.items():
            assert partition in expected
            assert (until, partition) in marks


def test_memory_goes_with_the_live_leases():
    """H11: short attempts of a type with a lease of a day leave nothing behind."""
    wheel = LeaseWheel(1.0)

    def work(number):
        wheel.grant(Lease(AttemptId(number, 0, 0), "w", 86_400.0, number / 1000, 0))
        wheel.end(AttemptId(number - 10, 0, 0), "w")
        wheel.grant(Lease(AttemptId(number, 0, 0), "v", 86_400.0, number / 1000, 0))
        wheel.end(AttemptId(number - 10, 0, 0), "v")

    assert growth_bytes(work) < 50_000
    assert len(wheel) == 10
