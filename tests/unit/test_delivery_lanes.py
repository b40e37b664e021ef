"""Who is called next."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.callbacks.lanes import Lanes, Waiting
from penstock.contracts.event import Callback

TARGETS = [f"http://t{number}/" for number in range(4)]


class Record:
    """A record in hand that counts how often it was settled."""

    def __init__(self, partition=0):
        self.partition = partition
        self.settled = 0

    def settle(self):
        self.settled += 1


def waiting(callback_id, target, attempt=0, partition=0):
    callback = Callback(id=callback_id, target=target, task_id=1, attempt=attempt, body=b"{}")
    return Waiting(callback, Record(partition))


class LanesMachine(RuleBasedStateMachine):
    """C5: whatever comes and goes, no target and no sum exceeds its slots, none is idle while somebody could use
    it, each lane keeps its order, and everything put in comes out exactly once."""

    @initialize(slots=st.integers(1, 6), data=st.data())
    def begin(self, slots, data):
        self.slots = slots
        self.target_slots = data.draw(st.integers(1, slots))
        self.lanes = Lanes(slots=slots, target_slots=self.target_slots, patience_s=10)
        self.inside = {target: [] for target in TARGETS}
        self.calling = Counter()
        self.number = 0

    @rule(to=st.sampled_from(TARGETS), partition=st.integers(0, 1))
    def put(self, to, partition):
        self.number += 1
        item = waiting(f"m{self.number}", to, partition=partition)
        assert self.lanes.put(item) is None
        self.inside[to].append(item)
        self.admit()

    @rule(data=st.data())
    def finish(self, data):
        busy = [target for target in TARGETS if self.calling[target]]
        if busy:
            target = data.draw(st.sampled_from(busy))
            self.calling[target] -= 1
            self.lanes.finish(target, None)
            self.admit()

    @rule(partition=st.integers(0, 1))
    def take_out(self, partition):
        out = self.lanes.take_out(lambda item: item.record.partition == partition)
        expected = [
            item for lane in self.inside.values() for item in lane if item.record.partition == partition
        ]
        assert Counter(map(id, out)) == Counter(map(id, expected))
        for lane in self.inside.values():
            lane[:] = [item for item in lane if item.record.partition != partition]

    def admit(self):
        for item in self.lanes.admit():
            target = item.callback.target
            assert self.inside[target].pop(0) is item
            self.calling[target] += 1

    @invariant()
    def within_bounds_and_nothing_idle(self):
        if not hasattr(self, "lanes"):
            return
        assert self.lanes.waiting == sum(map(len, self.inside.values()))
        assert self.calling.total() <= self.slots
        assert all(count <= self.target_slots for count in self.calling.values())
        if self.calling.total() < self.slots:
            assert not any(
                self.inside[target] and self.calling[target] < self.target_slots for target in TARGETS
            )


TestLanes = LanesMachine.TestCase
TestLanes.settings = settings(max_examples=40, stateful_step_count=30)


def test_lanes_take_turns():
    """C5: a target with a thousand waiting is called no more often than one with three."""
    lanes = Lanes(slots=6, target_slots=6, patience_s=10)
    for number in range(1000):
        lanes.put(waiting(f"a{number}", TARGETS[0]))
    for number in range(3):
        lanes.put(waiting(f"b{number}", TARGETS[1]))
    admitted = [item.callback.id for item in lanes.admit()]
    assert admitted == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_second_copy_replaces_the_first():
    """C7b: after a rebalance everything in line comes again; the place is kept, the old record let go."""
    lanes = Lanes(slots=1, target_slots=1, patience_s=10)
    first, other, copy = waiting("a", TARGETS[0]), waiting("b", TARGETS[0]), waiting("a", TARGETS[0])
    assert lanes.put(first) is None
    assert lanes.put(other) is None
    assert lanes.put(copy) is first.record
    assert lanes.admit() == [copy]
    lanes.finish(TARGETS[0], None)
    assert lanes.admit() == [other]


def test_an_older_attempt_does_not_replace_a_newer_one():
    """C6: a record from before a retry is let go itself."""
    lanes = Lanes(slots=1, target_slots=1, patience_s=10)
    newer, older = waiting("a", TARGETS[0], attempt=2), waiting("a", TARGETS[0], attempt=1)
    assert lanes.put(newer) is None
    assert lanes.put(older) is older.record
    assert lanes.admit() == [newer]


@given(pace=st.floats(0.001, 30), count=st.integers(0, 200), slots=st.integers(1, 8))
def test_who_would_wait_too_long_is_crowded_out(pace, count, slots):
    """C5: at the target's pace, those kept are called within the patience, and nobody is sent away who could be."""
    lanes = Lanes(slots=slots, target_slots=slots, patience_s=10)
    target = TARGETS[0]
    lanes.put(waiting("first", target))
    (first,) = lanes.admit()
    lanes.finish(first.callback.target, pace)
    items = [waiting(f"m{number}", target) for number in range(count)]
    for item in items:
        lanes.put(item)
    out = lanes.crowded_out(target)
    kept = lanes.waiting
    assert kept * pace / slots <= 10 * (1 + 1e-9)
    assert not out or (kept + 1) * pace / slots > 10 * (1 - 1e-9)
    assert out == items[kept:][::-1]


def test_a_target_of_unknown_pace_keeps_everything():
    """C5: nothing is sent away on suspicion."""
    lanes = Lanes(slots=1, target_slots=1, patience_s=0.001)
    for number in range(100):
        lanes.put(waiting(f"m{number}", TARGETS[0]))
    assert lanes.crowded_out(TARGETS[0]) == []
    assert lanes.crowded_out("http://nobody/") == []
