"""Who is called next."""

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.callbacks.hand import Waiting
from penstock.callbacks.lanes import Lanes, Room
from penstock.callbacks.slow_pool import SlowPool
from penstock.contracts.event import Callback
from penstock.core.rates import Rates
from penstock.core.target import TargetId

# Two addresses, each as two namespaces call it.
TARGETS = [TargetId(namespace, f"http://t{number}/") for namespace in ("acme", "beta") for number in range(2)]


class Record:
    """A record in hand that counts how often it was settled."""

    def __init__(self, partition=0):
        self.topic = "callbacks"
        self.partition = partition
        self.settled = 0

    def settle(self):
        self.settled += 1


def waiting(callback_id, target, attempt=0, partition=0):
    callback = Callback(id=callback_id, target=target, task_id=1, attempt=attempt, body=b"{}")
    return Waiting(callback, Record(partition))


def lanes_of(
    slots, target_slots=None, *, patience_s=10, most=10_000, in_all=10_000, doubtful_slots=None, **given
):
    room = Room(
        slots=slots,
        target_slots=target_slots or slots,
        doubtful_slots=doubtful_slots or slots,
        waiting=most,
        waiting_in_all=in_all,
        patience_s=patience_s,
    )
    return Lanes(room, **given)


def call(lanes, item, took_s):
    assert lanes.may_call(item)
    assert lanes.finish(item.callback.target, took_s) is None


class LanesMachine(RuleBasedStateMachine):
    """C5: whatever comes and goes, no target and no sum exceeds its slots or has more calls than it may, none is idle
    while somebody may use it, each lane keeps its order to the call, and everything put in comes out exactly once."""

    @initialize(slots=st.integers(1, 12), data=st.data())
    def begin(self, slots, data):
        self.slots = slots
        self.target_slots = data.draw(st.integers(1, slots))
        self.doubtful_slots = data.draw(st.integers(1, slots))
        self.doubtful = set()
        self.lanes = lanes_of(
            slots,
            self.target_slots,
            doubtful_slots=self.doubtful_slots,
            doubtful=lambda target: target in self.doubtful,
        )
        self.inside = {target: [] for target in TARGETS}
        # Admitted, and its attempt not written down yet; then waiting for a call to end; then called.
        self.admitted = {target: [] for target in TARGETS}
        self.ready = {target: [] for target in TARGETS}
        self.calling = Counter()
        # Of the slots held, those that were taken while their target was doubtful.
        self.doubted = Counter()
        self.paced = set()
        self.number = 0
        self.now_s = 0.0
        self.came_s = {}

    def held(self, target):
        return len(self.admitted[target]) + len(self.ready[target]) + self.calling[target]

    @rule(to=st.sampled_from(TARGETS), partition=st.integers(0, 1))
    def put(self, to, partition):
        self.number += 1
        item = waiting(f"m{self.number}", to, partition=partition)
        assert self.lanes.put(item, self.now_s) is None
        self.came_s[item.callback.id] = self.now_s
        self.inside[to].append(item)
        self.admit()

    @rule(passed_s=st.sampled_from([1.0, 7.0, 16.0]))
    def send_back(self, passed_s):
        self.now_s += passed_s
        long_ago_s = self.now_s - 15.0
        expected = [
            item
            for lane in self.inside.values()
            for item in lane
            if self.came_s[item.callback.id] < long_ago_s
        ]
        assert Counter(map(id, self.lanes.overdue(self.now_s))) == Counter(map(id, expected))
        for lane in self.inside.values():
            lane[:] = [item for item in lane if self.came_s[item.callback.id] >= long_ago_s]

    @rule(data=st.data(), mine=st.booleans())
    def written(self, data, mine):
        some = [target for target in TARGETS if self.admitted[target]]
        if not some:
            return
        target = data.draw(st.sampled_from(some))
        item = self.admitted[target].pop(0)
        if not mine:
            self.doubted[target] -= self.doubted[target] > 0
            self.lanes.forgo(target)
        elif self.lanes.may_call(item):
            assert not self.ready[target], "called before one that was ready earlier"
            self.calling[target] += 1
        else:
            assert self.calling[target] == self.target_slots, "made to wait with a call to spare"
            self.ready[target].append(item)
        self.admit()

    @rule(data=st.data(), slow=st.booleans(), took_s=st.sampled_from([0.001, 0.02, 5.0]))
    def finish(self, data, slow, took_s):
        busy = [target for target in TARGETS if self.calling[target]]
        if not busy:
            return
        target = data.draw(st.sampled_from(busy))
        (self.doubtful.add if slow else self.doubtful.discard)(target)
        self.paced.add(target)
        self.doubted[target] -= self.doubted[target] > 0
        following = self.lanes.finish(target, took_s)
        if self.ready[target]:
            assert following is self.ready[target].pop(0)
        else:
            assert following is None
            self.calling[target] -= 1
        self.admit()

    @rule(partition=st.integers(0, 1), to=st.sampled_from([None, *TARGETS]))
    def take_out(self, partition, to):
        out = self.lanes.take_out(lambda item: item.record.partition == partition, to)
        lanes = [lane for target, lane in self.inside.items() if to in (None, target)]
        expected = [item for lane in lanes for item in lane if item.record.partition == partition]
        assert Counter(map(id, out)) == Counter(map(id, expected))
        for lane in lanes:
            lane[:] = [item for item in lane if item.record.partition != partition]

    @rule(of=st.sampled_from([None, *TARGETS]))
    def take_ready(self, of):
        some = TARGETS if of is None else [of]
        expected = [item for target in some for item in self.ready[target]]
        assert Counter(map(id, self.lanes.take_ready(of))) == Counter(map(id, expected))
        for target in some:
            for _ in self.ready[target]:
                self.doubted[target] -= self.doubted[target] > 0
            self.ready[target] = []
        self.admit()

    def admit(self):
        for item in self.lanes.admit():
            target = item.callback.target
            assert self.inside[target].pop(0) is item
            free = self.slots - self.total()
            assert not self.held(target) or free > int(self.slots / 4), "a second slot while few are free"
            ahead = self.held(target) - self.target_slots
            assert ahead < 0 or target in self.paced, "ahead of a target of unknown pace"
            assert ahead < 0 or target not in self.doubtful, "ahead of a doubtful target"
            self.admitted[target].append(item)
            self.doubted[target] += target in self.doubtful

    def total(self):
        return sum(self.held(target) for target in TARGETS)

    @invariant()
    def within_bounds_and_nothing_idle(self):
        if not hasattr(self, "lanes"):
            return
        assert self.lanes.waiting == sum(map(len, self.inside.values()))
        assert self.lanes.held == self.total() <= self.slots
        assert all(count <= self.target_slots for count in self.calling.values())
        assert self.doubted.total() <= self.doubtful_slots
        free = self.slots - self.total()
        for target in TARGETS:
            assert self.held(target) == self.lanes.held_by(target)
            if not self.inside[target] or self.held(target) >= self.target_slots:
                continue
            full = not free or (self.held(target) and free <= int(self.slots / 4))
            assert full or (target in self.doubtful and self.doubted.total() >= self.doubtful_slots)


TestLanes = LanesMachine.TestCase
TestLanes.settings = settings(max_examples=40, stateful_step_count=30)


def test_lanes_take_turns():
    """C5: a target with a thousand waiting is called no more often than one with three."""
    lanes = lanes_of(9)
    for number in range(1000):
        lanes.put(waiting(f"a{number}", TARGETS[0]))
    for number in range(3):
        lanes.put(waiting(f"b{number}", TARGETS[1]))
    admitted = [item.callback.id for item in lanes.admit()]
    assert admitted == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]


def test_a_second_copy_replaces_the_first():
    """C7b: after a rebalance everything in line comes again; the place is kept, the old record let go."""
    lanes = lanes_of(1)
    first, other, copy = waiting("a", TARGETS[0]), waiting("b", TARGETS[0]), waiting("a", TARGETS[0])
    assert lanes.put(first) is None
    assert lanes.put(other) is None
    assert lanes.put(copy) is first.record
    assert lanes.admit() == [copy]
    lanes.forgo(TARGETS[0])
    assert lanes.admit() == [other]


def test_an_older_attempt_does_not_replace_a_newer_one():
    """C6: a record from before a retry is let go itself."""
    lanes = lanes_of(1)
    newer, older = waiting("a", TARGETS[0], attempt=2), waiting("a", TARGETS[0], attempt=1)
    assert lanes.put(newer) is None
    assert lanes.put(older) is older.record
    assert lanes.admit() == [newer]


@given(pace=st.floats(0.001, 30), count=st.integers(0, 200), slots=st.integers(1, 8))
def test_who_would_wait_too_long_is_crowded_out(pace, count, slots):
    """C5: at the target's pace, those kept are called within the patience, and nobody is sent away who could be."""
    lanes = lanes_of(slots)
    target = TARGETS[0]
    lanes.put(waiting("first", target))
    call(lanes, *lanes.admit(), pace)
    items = [waiting(f"m{number}", target) for number in range(count)]
    for item in items:
        lanes.put(item)
    out, again_s = lanes.crowded_out(target)
    kept = lanes.waiting
    # But for those that can begin at once, however slow it is.
    assert kept <= slots or kept * pace / slots <= 10 * (1 + 1e-9)
    assert kept >= min(count, slots)
    assert again_s <= max(10, pace) * (1 + 1e-9)
    assert not out or (kept + 1) * pace / slots > 10 * (1 - 1e-9)
    assert out == items[kept:][::-1]


def test_the_slowest_target_is_still_called():
    """C5: a call that took all of the patience, or a rate below one in it, must not be the last one ever."""
    for lanes in (lanes_of(1), lanes_of(1, rates=Rates(lambda _target: 0.01))):
        lanes.put(waiting("first", TARGETS[0]))
        call(lanes, *lanes.admit(), 10.001)
        lanes.put(waiting("next", TARGETS[0]))
        assert lanes.crowded_out(TARGETS[0])[0] == []
        assert [item.callback.id for item in lanes.admit(1000.0)] == ["next"]


def test_a_target_of_unknown_pace_keeps_everything():
    """C5: nothing is sent away on suspicion."""
    lanes = lanes_of(1, patience_s=0.001)
    for number in range(100):
        lanes.put(waiting(f"m{number}", TARGETS[0]))
    assert lanes.crowded_out(TARGETS[0]) == ([], 0.0)
    assert lanes.crowded_out("http://nobody/") == ([], 0.0)


def test_who_waits_behind_others_slots_is_sent_back():
    """C5: one callback each of fifty targets, none ever answering, and one slot for the doubtful: their own pace says that
    each can begin at once, and the last of them would wait for minutes and keep its record from being settled."""
    targets = [TargetId("acme", f"http://hangs/{number}") for number in range(50)]
    lanes = lanes_of(3, 1, doubtful_slots=1, doubtful=lambda _target: True)
    items = [waiting(f"m{number}", target) for number, target in enumerate(targets)]
    for item in items:
        lanes.put(item, 100.0)
    assert lanes.admit(100.0) == [items[0]]
    assert not [item for target in targets for item in lanes.crowded_out(target)[0]]
    assert lanes.overdue(114.9) == []
    assert lanes.overdue(115.1) == items[1:]
    assert lanes.waiting == 0
    lanes.forgo(targets[0])
    again = waiting("again", targets[7])
    lanes.put(again, 116.0)
    assert lanes.admit(116.0) == [again]


def test_a_second_copy_has_waited_as_long_as_the_first():
    """C7b: what comes again keeps its place, and those behind it are not forgotten for its sake."""
    lanes = lanes_of(1)
    first, second, copy = (waiting(name, TARGETS[0]) for name in ("a", "b", "a"))
    lanes.put(first, 0.0)
    lanes.put(second, 0.0)
    lanes.put(copy, 14.0)
    assert lanes.overdue(16.0) == [copy, second]


def test_a_lane_holds_only_so_many():
    """C5: whatever its pace, nobody's lane fills the hand of the process."""
    lanes = lanes_of(1, most=3)
    items = [waiting(f"m{number}", TARGETS[0]) for number in range(5)]
    for item in items:
        lanes.put(item)
    assert lanes.crowded_out(TARGETS[0])[0] == [items[4], items[3]]


def test_many_long_lanes_keep_their_share():
    """C5: ten lanes of the most each would fill the hand; beyond the sum each keeps a tenth of it."""
    lanes = lanes_of(1, most=100, in_all=20)
    for target in TARGETS:
        for number in range(10):
            lanes.put(waiting(f"{target}{number}", target))
    for target in TARGETS:
        lanes.crowded_out(target)
    assert [lanes.waiting_for(target) for target in TARGETS] == [5] * 4
    assert lanes.waiting == 20


def test_hanging_targets_leave_the_reserve_to_others():
    """C5: however many targets fill their lanes, the last quarter of the slots goes to those who have none."""
    lanes = lanes_of(16, 8)
    for target in TARGETS[:3]:
        for number in range(100):
            lanes.put(waiting(f"{target}{number}", target))
    assert len(lanes.admit()) == 12
    lanes.put(waiting("healthy", TARGETS[3]))
    assert [item.callback.id for item in lanes.admit()] == ["healthy"]


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=100), st.floats(0.5, 100))
def test_a_rate_is_kept(passing, rate):
    """Never two calls nearer than 1 / rate, none delayed when its time has come, and none forgotten."""
    lanes = lanes_of(1000, rates=Rates(lambda _target: rate))
    now_s, called_s = 0.0, []
    for number, passed_s in enumerate(passing):
        now_s += passed_s
        lanes.put(waiting(f"m{number}", TARGETS[0]))
        called_s += [now_s for _item in lanes.admit(now_s)]
    while len(called_s) < len(passing):
        turn_s = lanes.next_turn_s()
        assert turn_s is not None
        now_s = max(now_s, turn_s)
        called_s += [now_s for _item in lanes.admit(now_s)]
    for earlier_s, later_s in itertools.pairwise(called_s):
        assert later_s - earlier_s >= 1 / rate * (1 - 1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.booleans()), min_size=1, max_size=100),
    st.floats(0.5, 100),
    st.integers(1, 3),
)
def test_a_rate_is_kept_over_both_paths_together(arriving, rate, slots):
    """Issue 5: what goes to one target by the normal path and by the diverted one is never nearer than 1 / rate, and
    each path gets through with all it has."""
    rates = Rates(lambda _target: rate)
    paths = [lanes_of(slots, rates=rates) for _ in range(2)]
    now_s, called_s = 0.0, []

    def admit():
        for path in paths:
            while some := path.admit(now_s):
                called_s.extend(now_s for _item in some)
                for item in some:
                    path.forgo(item.callback.target)

    for number, (passed_s, aside) in enumerate(arriving):
        now_s += passed_s
        paths[aside].put(waiting(f"m{number}", TARGETS[0]))
        admit()
    while any(path.waiting for path in paths):
        now_s = max(now_s, min(at_s for path in paths if (at_s := path.next_turn_s()) is not None))
        admit()
    assert len(called_s) == len(arriving)
    for earlier_s, later_s in itertools.pairwise(called_s):
        assert later_s - earlier_s >= 1 / rate * (1 - 1e-9)


def test_paths_take_turns_at_a_target_that_has_a_rate():
    """Issue 5: neither path keeps a target from the other, however late the timer is, and whichever is asked first."""
    rates = Rates(lambda _target: 10.0)
    paths = {name: lanes_of(5, rates=rates) for name in ("normal", "diverted")}
    for number in range(20):
        for name, path in paths.items():
            path.put(waiting(f"{name} {number}", TARGETS[0]))
    called = []
    for turn in range(12):
        # The timer is half a call late each time.
        for path in paths.values():
            for item in path.admit(turn * 0.15):
                called.append(item.callback.id.split()[0])
                path.forgo(TARGETS[0])
    assert called[:6] == ["normal", "diverted"] * 3


def test_a_path_that_has_no_slot_does_not_keep_a_target_from_the_other():
    """Issue 5: the diverted path has asked for its turn when its only slot goes to another target, whose call never ends:
    the normal path goes on, and has left it one turn."""
    rates = Rates(lambda target: 4.0 if target == TARGETS[0] else None)
    normal, diverted = lanes_of(5, rates=rates), lanes_of(1, rates=rates)
    for number in range(100):
        normal.put(waiting(f"n{number}", TARGETS[0]))
    assert len(normal.admit(0.0)) == 1
    diverted.put(waiting("aside", TARGETS[0]))
    assert diverted.admit(0.0) == []
    diverted.put(waiting("hangs", TARGETS[1]))
    assert len(diverted.admit(0.0)) == 1
    normal.forgo(TARGETS[0])
    called_s = []
    for tick in range(1, 101):
        for _item in normal.admit(tick / 8):
            called_s.append(tick / 8)
            normal.forgo(TARGETS[0])
        assert diverted.admit(tick / 8) == []
    assert len(called_s) >= 48
    assert called_s[0] == 0.5


@given(
    st.lists(st.tuples(st.sampled_from(["bound", "free"]), st.floats(0, 0.2)), min_size=1, max_size=100),
    st.sampled_from([None, 4.0, 30.0]),
)
def test_a_path_that_is_bound_keeps_to_it_and_takes_nothing_from_the_other(asks, rate):
    """Issue 5, number 5: the calls of a path that may make ten a second are a tenth of one apart; the other path has
    the target's own rate, and together they keep to that."""
    rates, now_s = Rates(lambda _target: rate), 0.0
    called_s = {"bound": [], "free": []}
    for path, passed_s in asks:
        now_s += passed_s
        at_s = rates.turn(TARGETS[0], path, now_s, 10.0 if path == "bound" else None)
        if at_s is None:
            called_s[path].append(now_s)
        else:
            assert at_s > now_s
            assert rate or path == "bound"
    for earlier_s, later_s in itertools.pairwise(called_s["bound"]):
        assert later_s - earlier_s >= 0.1 * (1 - 1e-9)
    if rate:
        for earlier_s, later_s in itertools.pairwise(sorted(called_s["bound"] + called_s["free"])):
            assert later_s - earlier_s >= 1 / rate * (1 - 1e-9)


def test_a_moment_in_which_all_calls_take_long_sends_nobody_away():
    """C5: two and a half thousand wait for a target that answers in 5 ms; once all eight calls take 200 ms, because this
    process was busy, and nobody goes back. When they do so for five seconds, most of them do."""
    lanes = lanes_of(100, 8)
    for number in range(2500):
        lanes.put(waiting(f"c{number}", TARGETS[0]))

    def round_of(took_s):
        for item in lanes.admit():
            lanes.may_call(item)
        for _ in range(8):
            lanes.finish(TARGETS[0], took_s)
        return len(lanes.crowded_out(TARGETS[0])[0])

    assert round_of(0.005) == 0
    assert round_of(0.2) == 0
    gone = sum(round_of(0.2) for _ in range(25))
    assert gone > 1000


def test_a_turn_that_nobody_uses_is_the_next_ones():
    """C5: two let others go first while few slots are free; the first of them has nothing left when one more is free."""
    lanes = lanes_of(8)
    for number in range(10):
        lanes.put(waiting(f"a{number}", TARGETS[0]))
    assert len(lanes.admit()) == 6
    for number in range(2):
        lanes.put(waiting(f"b{number}", TARGETS[1]))
    assert [item.callback.id for item in lanes.admit()] == ["b0"]
    lanes.take_out(lambda _waiting: True, TARGETS[0])
    lanes.forgo(TARGETS[0])
    lanes.forgo(TARGETS[0])
    assert [item.callback.id for item in lanes.admit()] == ["b1"]


def test_lanes_that_are_bound_wait_for_their_turn():
    """Issue 5, number 5: a target that is drained at two a second is called twice a second, then as it comes."""
    most = 2.0
    lanes = lanes_of(10, 5, bound=lambda _target: most, patience_s=1)
    for number in range(10):
        lanes.put(waiting(f"c{number}", TARGETS[0]))
    assert [len(lanes.admit(at_s)) for at_s in (0.0, 0.1, 0.5, 0.6)] == [1, 0, 1, 0]
    assert lanes.next_turn_s() == 1.0
    assert len(lanes.crowded_out(TARGETS[0])[0]) == 3
    most = None
    assert len(lanes.admit(1.0)) == 3


@given(before=st.floats(0.001, 1), after=st.one_of(st.none(), st.floats(0.5, 100)), passed_s=st.floats(0, 3))
def test_a_new_rate_counts_at_once(before, after, passed_s):
    """C8: a limit that is raised or lifted is not waited out, however low it was; and one call comes an interval after another."""
    rate = before
    rates = Rates(lambda _target: rate)
    lanes = lanes_of(10, rates=rates)
    for number in range(3):
        lanes.put(waiting(f"c{number}", TARGETS[0]))
    assert len(lanes.admit(100.0)) == 1
    assert not lanes.admit(100.0 + min(passed_s, 0.9 / before))
    now_s, rate = 100.0 + passed_s, after
    rates.renew(TARGETS[0], now_s)
    lanes.renew(TARGETS[0])
    lanes.renew(TARGETS[1])
    if after is None:
        assert len(lanes.admit(now_s)) == 2
    else:
        lanes.admit(now_s)
        assert lanes.waiting == 0 or lanes.next_turn_s() <= now_s + 1 / after + 1e-9
        assert lanes.waiting <= 2


def test_the_clocks_of_rates_are_forgotten():
    """Issue 5: a clock is kept while it says something, and no longer."""
    rates = Rates(lambda _target: 10.0)
    for number in range(1000):
        assert rates.turn(f"http://t{number}/", "path", 0.0) is None
    assert len(rates) == 1000
    rates.turn(TARGETS[0], "path", 1000.0)
    assert len(rates) == 1
    bound = Rates()
    assert bound.turn(TARGETS[0], "path", 0.0, 0.01) is None
    # Its own rate's clock would be forgotten by now.
    assert bound.turn(TARGETS[0], "path", 80.0, 0.01) == 100.0
    assert bound.turn(TARGETS[1], "path", 200.0, 0.01) is None
    assert len(bound) == 1


def test_the_slow_pool_is_bounded_in_all_and_for_each():
    """C7a: a call that finds no room keeps its slot."""
    pool = SlowPool(3, 2)
    assert [pool.enter(target) for target in "aaabb"] == [True, True, False, True, False]
    pool.leave("a")
    assert pool.enter("b")
    assert len(pool) == 3
