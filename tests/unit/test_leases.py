"""The lease wheel against a naive model."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.leases import Lease, LeaseWheel

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
