"""The lease wheel against a naive model."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.leases import Lease, LeaseWheel
from penstock.core.reading import ReadingProgress

KEYS = st.tuples(st.integers(1, 6), st.just(0), st.integers(0, 1))
WORKERS = st.sampled_from(["a", "b"])


class WheelMachine(RuleBasedStateMachine):
    """H8, H9: whatever is granted, beaten and released, a lease ends exactly when its silence has lasted its
    timeout, noticed at most a tick late."""

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

    @rule(key=KEYS, worker=WORKERS)
    def beat(self, key, worker):
        held = key in self.model and self.model[key][0] == worker
        assert self.wheel.beat(key, worker, self.now) is held
        if held:
            self.model[key][2] = self.now

    @rule(key=KEYS, worker=WORKERS)
    def release(self, key, worker):
        held = key in self.model and self.model[key][0] == worker
        assert self.wheel.release(key, worker) is held
        if held:
            del self.model[key]

    @rule(partition=st.integers(0, 2))
    def forget(self, partition):
        gone = [key for key, held in self.model.items() if held[3] == partition]
        assert self.wheel.forget(frozenset({partition})) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(seconds=st.floats(0, 400))
    def pass_time(self, seconds):
        self.now += seconds
        expired = self.wheel.expired(self.now)
        for lease in expired:
            _worker, timeout, seen, _partition = self.model.pop(lease.key)
            assert seen + timeout <= self.now, "a false expiry"
        assert [lease.deadline_s for lease in expired] == sorted(lease.deadline_s for lease in expired)
        for _worker, timeout, seen, _partition in self.model.values():
            assert seen + timeout > self.now - 2 * self.tick, "an expiry was missed for more than a tick"

    @invariant()
    def same_leases(self):
        if hasattr(self, "model"):
            assert {lease.key for lease in self.wheel} == set(self.model)


TestWheel = WheelMachine.TestCase
TestWheel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(beats=st.lists(st.floats(0, 290), max_size=20))
def test_a_lease_that_is_beaten_in_time_never_expires(beats):
    """H8: idleness is elapsed time since the last sign of life, never a count of checks."""
    wheel = LeaseWheel(1.0)
    now = 0.0
    wheel.grant(Lease((1, 0, 0), "a", 300.0, now, 0))
    for pause in beats:
        now += pause
        assert wheel.expired(now) == []
        assert wheel.beat((1, 0, 0), "a", now)
    assert len(wheel.expired(now + 302)) == 1


@given(
    said=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 2)), max_size=30),
    looks=st.lists(
        st.tuples(st.floats(0.1, 30), st.dictionaries(st.integers(0, 2), st.floats(0, 60))), max_size=15
    ),
)
def test_silence_that_was_not_read_expires_nobody(said, looks):
    """H8: time in which the processor itself was not reading does not count against a task."""
    wheel = LeaseWheel(1.0)
    held = {}
    for number, (seen, partition) in enumerate(said):
        held[number, 0, 0] = (seen, partition)
        wheel.grant(Lease((number, 0, 0), "w", 10.0, seen, partition))
    now = 100.0
    for seconds, behind in looks:
        now += seconds
        until = {partition: now - lag for partition, lag in behind.items()}
        for lease in wheel.expired(now, until):
            seen, partition = held.pop(lease.key)
            assert seen + 10.0 <= until[partition]
    gone = {lease.key for lease in wheel.expired(now + 200, dict.fromkeys(range(3), now + 200))}
    assert gone == set(held), "what was put off is not forgotten"


@given(
    looks=st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 1), st.integers(0, 50)),
            st.dictionaries(st.integers(0, 1), st.integers(0, 50)),
        ),
        max_size=20,
    )
)
def test_everything_said_before_is_read_once_the_mark_is_passed(looks):
    """H8: against the plainest model: the last asking whose every end was read."""
    progress = ReadingProgress()
    asked = []
    for at, (ends, expected) in enumerate(looks):
        progress.asked(ends, at)
        progress.read(expected)
        asked = [(when, which, end) for when, which, end in asked if which in expected]
        asked += [(at, which, end) for which, end in ends.items() if which in expected]
        for which, until in progress.until_s.items():
            assert which in expected
            assert (until, which) in {(when, partition) for when, partition, _end in asked}
