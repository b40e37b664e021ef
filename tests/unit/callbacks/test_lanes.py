"""The order and the bounds of calls: lanes, the pacer and the slow pool."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.callbacks.hosts import Hosts
from penstock.callbacks.lanes import Lanes
from penstock.callbacks.receiver import InFlight
from penstock.callbacks.settings import CallbacksSettings, LaneBounds
from penstock.contracts.event import Callback
from penstock.core.call_pacer import CallPacer
from penstock.core.fair_share import most_used
from penstock.core.target import TargetId

# Two addresses, each as two namespaces call it.
TARGETS = [TargetId(namespace, f"http://t{number}/") for namespace in ("acme", "beta") for number in range(2)]


class Record:
    """A Kafka record that counts how often it was settled."""

    def __init__(self, partition=0):
        self.topic = "callbacks"
        self.partition = partition
        self.settled = 0

    def settle(self):
        self.settled += 1


def waiting(callback_id, target, attempt=0, partition=0):
    callback = Callback(id=callback_id, target=target, task_id=1, attempt=attempt, body=b"{}")
    return InFlight(callback, Record(partition))


def lanes_of(
    slots,
    target_slots=None,
    *,
    longest_wait_s=10,
    lane_size=10_000,
    total_size=10_000,
    unresponsive_slots=None,
    host_slots=None,
    untrusted_slots=None,
    server_slots=None,
    **parts,
):
    bounds = LaneBounds(
        slots=slots,
        target_slots=target_slots or slots,
        host_slots=host_slots or slots,
        untrusted_slots=untrusted_slots or slots,
        server_slots=server_slots or slots,
        unresponsive_slots=unresponsive_slots or slots,
        lane_size=lane_size,
        total_size=total_size,
        longest_wait_s=longest_wait_s,
    )
    hosts = Hosts(CallbacksSettings())
    parts = {"host_of": hosts.of, "servers_of": hosts.servers_of, **parts}
    return Lanes(bounds, **parts)


def call(lanes, item, took_s):
    assert lanes.start(item)
    assert lanes.finish(item.callback.target, took_s) is None


class LanesMachine(RuleBasedStateMachine):
    """C5: no target and no sum exceeds its slots or calls, and no slot is idle while a target may
    use it.

    Each lane keeps its order up to the call, and every callback leaves exactly once.
    """

    @initialize(slots=st.integers(1, 12), data=st.data())
    def begin(self, slots, data):
        self.slots = slots
        self.target_slots = data.draw(st.integers(1, slots))
        self.unresponsive_slots = data.draw(st.integers(1, slots))
        self.unresponsive = set()
        self.lanes = lanes_of(
            slots,
            self.target_slots,
            unresponsive_slots=self.unresponsive_slots,
            is_unresponsive=lambda target: target in self.unresponsive,
        )
        self.inside = {target: [] for target in TARGETS}
        # Admitted, and its attempt not written down yet; then waiting for a call to end; then
        # called.
        self.admitted = {target: [] for target in TARGETS}
        self.ready = {target: [] for target in TARGETS}
        self.calling = Counter()
        # By slot in use, the latest last: whether its target was unresponsive when it was taken.
        self.charged = {target: [] for target in TARGETS}
        self.paced = set()
        self.number = 0
        self.now_s = 0.0
        self.queued_s = {}

    def held(self, target):
        return len(self.admitted[target]) + len(self.ready[target]) + self.calling[target]

    @rule(to=st.sampled_from(TARGETS), partition=st.integers(0, 1))
    def put(self, to, partition):
        self.number += 1
        item = waiting(f"m{self.number}", to, partition=partition)
        assert self.lanes.put(item, self.now_s) is None
        self.queued_s[item.callback.id] = self.now_s
        self.inside[to].append(item)
        self.admit()

    @rule(passed_s=st.sampled_from([1.0, 7.0, 16.0]))
    def take_overdue(self, passed_s):
        self.now_s += passed_s
        long_ago_s = self.now_s - 15.0
        expected = [
            item
            for lane in self.inside.values()
            for item in lane
            if self.queued_s[item.callback.id] < long_ago_s
        ]
        assert Counter(map(id, self.lanes.take_overdue(self.now_s))) == Counter(map(id, expected))
        for lane in self.inside.values():
            lane[:] = [item for item in lane if self.queued_s[item.callback.id] >= long_ago_s]

    @rule(data=st.data(), granted=st.booleans())
    def end_claim(self, data, granted):
        some = [target for target in TARGETS if self.admitted[target]]
        if not some:
            return
        target = data.draw(st.sampled_from(some))
        item = self.admitted[target].pop(0)
        if not granted:
            self.charged[target].pop()
            self.lanes.free_slot(target)
        elif self.lanes.start(item):
            assert not self.ready[target], "called before an earlier claim"
            self.calling[target] += 1
        else:
            assert self.calling[target] == self.target_slots, "waits although a call is free"
            self.ready[target].append(item)
        self.admit()

    @rule(data=st.data(), slow=st.booleans(), took_s=st.sampled_from([0.001, 0.02, 5.0]))
    def finish(self, data, slow, took_s):
        busy = [target for target in TARGETS if self.calling[target]]
        if not busy:
            return
        target = data.draw(st.sampled_from(busy))
        (self.unresponsive.add if slow else self.unresponsive.discard)(target)
        self.paced.add(target)
        self.charged[target].pop()
        following = self.lanes.finish(target, took_s)
        if self.ready[target]:
            assert following is self.ready[target].pop(0)
        else:
            assert following is None
            self.calling[target] -= 1
        self.admit()

    @rule(partition=st.integers(0, 1), to=st.sampled_from([None, *TARGETS]))
    def take_waiting(self, partition, to):
        out = self.lanes.take_waiting(lambda item: item.record.partition == partition, to)
        lanes = [lane for target, lane in self.inside.items() if to in (None, target)]
        expected = [item for lane in lanes for item in lane if item.record.partition == partition]
        assert Counter(map(id, out)) == Counter(map(id, expected))
        for lane in lanes:
            lane[:] = [item for item in lane if item.record.partition != partition]

    @rule(of=st.sampled_from(TARGETS))
    def take_claimed(self, of):
        assert self.lanes.take_claimed(of) == self.ready[of]
        for _ in self.ready[of]:
            self.charged[of].pop()
        self.ready[of] = []
        self.admit()

    def admit(self):
        for item in self.lanes.admit():
            target = item.callback.target
            assert self.inside[target].pop(0) is item
            free = self.slots - self.total()
            assert not self.held(target) or free > int(self.slots / 4), "a second slot while few are free"
            ahead = self.held(target) - self.target_slots
            assert ahead < 0 or target in self.paced, "ahead of a target of unknown pace"
            assert ahead < 0 or target not in self.unresponsive, "ahead of an unresponsive target"
            self.admitted[target].append(item)
            self.charged[target].append(target in self.unresponsive)

    def total(self):
        return sum(self.held(target) for target in TARGETS)

    @invariant()
    def within_bounds_and_nothing_idle(self):
        if not hasattr(self, "lanes"):
            return
        assert self.lanes.waiting == sum(map(len, self.inside.values()))
        assert self.lanes.slots_in_use == self.total() <= self.slots
        assert all(count <= self.target_slots for count in self.calling.values())
        unresponsive = sum(map(sum, self.charged.values()))
        assert unresponsive <= self.unresponsive_slots
        free = self.slots - self.total()
        for target in TARGETS:
            assert self.held(target) == self.lanes.slots_of(target)
            if not self.inside[target] or self.held(target) >= self.target_slots:
                continue
            full = not free or (self.held(target) and free <= int(self.slots / 4))
            namespace = [other for other in TARGETS if other.namespace == target.namespace]
            full |= sum(map(self.held, namespace)) >= most_used(free)
            unresponsive_here = sum(sum(self.charged[other]) for other in namespace)
            unresponsive_free = self.unresponsive_slots - unresponsive
            full |= target in self.unresponsive and (
                not unresponsive_free or unresponsive_here >= most_used(unresponsive_free)
            )
            assert full


TestLanes = LanesMachine.TestCase
TestLanes.settings = settings(max_examples=40, stateful_step_count=30)


def test_lanes_are_served_round_robin():
    """C5: a target with a thousand waiting callbacks is called no more often than one with
    three."""
    lanes = lanes_of(9)
    for number in range(1000):
        lanes.put(waiting(f"a{number}", TARGETS[0]))
    for number in range(3):
        lanes.put(waiting(f"b{number}", TARGETS[1]))
    admitted = [item.callback.id for item in lanes.admit()]
    assert admitted == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]


def test_a_repeated_record_supersedes_the_first():
    """C7b: after a rebalance waiting callbacks arrive again; each keeps its place."""
    lanes = lanes_of(1)
    first, other, copy = waiting("a", TARGETS[0]), waiting("b", TARGETS[0]), waiting("a", TARGETS[0])
    assert lanes.put(first) is None
    assert lanes.put(other) is None
    assert lanes.put(copy) is first.record
    assert lanes.admit() == [copy]
    lanes.free_slot(TARGETS[0])
    assert lanes.admit() == [other]


def test_an_older_attempt_does_not_replace_a_newer_one():
    """C6: a record from before a retry is superseded itself."""
    lanes = lanes_of(1)
    newer, older = waiting("a", TARGETS[0], attempt=2), waiting("a", TARGETS[0], attempt=1)
    assert lanes.put(newer) is None
    assert lanes.put(older) is older.record
    assert lanes.admit() == [newer]


@given(pace=st.floats(0.001, 30), count=st.integers(0, 200), slots=st.integers(1, 8))
def test_excess_is_what_would_wait_too_long(pace, count, slots):
    """C5: excess leaves.

    Callbacks that stay are called within the longest wait at the target's pace, and no others
    could stay.
    """
    lanes = lanes_of(slots)
    target = TARGETS[0]
    lanes.put(waiting("first", target))
    call(lanes, *lanes.admit(), pace)
    items = [waiting(f"m{number}", target) for number in range(count)]
    for item in items:
        lanes.put(item)
    out = lanes.take_excess(target)
    kept = lanes.waiting
    # Callbacks that can begin at once stay, however slow the target is.
    assert kept <= slots or kept * pace / slots <= 10 * (1 + 1e-9)
    assert kept >= min(count, slots)
    assert not out or (kept + 1) * pace / slots > 10 * (1 - 1e-5)
    assert out == items[kept:][::-1]


def test_a_very_slow_target_is_called_again():
    """C5: a call longer than the longest wait, or a rate below one call in it, is not the last."""
    for lanes in (lanes_of(1), lanes_of(1, pacer=CallPacer(lambda _target: 0.01))):
        lanes.put(waiting("first", TARGETS[0]))
        call(lanes, *lanes.admit(), 10.001)
        lanes.put(waiting("next", TARGETS[0]))
        assert lanes.take_excess(TARGETS[0]) == []
        assert [item.callback.id for item in lanes.admit(1000.0)] == ["next"]


def test_a_target_of_unknown_pace_keeps_everything():
    """C5: without a measured call no callback leaves."""
    lanes = lanes_of(1, longest_wait_s=0.001)
    for number in range(100):
        lanes.put(waiting(f"m{number}", TARGETS[0]))
    assert lanes.take_excess(TARGETS[0]) == []
    assert lanes.take_excess("http://nobody/") == []


def test_callbacks_behind_slots_of_other_targets_become_overdue():
    """C5: fifty targets hang, with one callback each and one slot for unresponsive targets.

    By its own pace each callback could begin at once. The last one would wait for minutes and block
    its record.
    """
    targets = [TargetId("acme", f"http://hangs/{number}") for number in range(50)]
    lanes = lanes_of(3, 1, unresponsive_slots=1, is_unresponsive=lambda _target: True)
    items = [waiting(f"m{number}", target) for number, target in enumerate(targets)]
    for item in items:
        lanes.put(item, 100.0)
    assert lanes.admit(100.0) == [items[0]]
    assert not [item for target in targets for item in lanes.take_excess(target)]
    assert lanes.take_overdue(114.9) == []
    assert lanes.take_overdue(115.1) == items[1:]
    assert lanes.waiting == 0
    lanes.free_slot(targets[0])
    again = waiting("again", targets[7])
    lanes.put(again, 116.0)
    assert lanes.admit(116.0) == [again]


def test_a_repeated_record_has_waited_as_long_as_the_first():
    """C7b: a repeated callback keeps its place and its time, and those behind it become overdue,
    too."""
    lanes = lanes_of(1)
    first, second, copy = (waiting(name, TARGETS[0]) for name in ("a", "b", "a"))
    lanes.put(first, 0.0)
    lanes.put(second, 0.0)
    lanes.put(copy, 14.0)
    assert lanes.take_overdue(16.0) == [copy, second]


def test_a_lane_is_bounded():
    """C5: a lane is bounded at any pace, so no target uses all the memory for waiting callbacks."""
    lanes = lanes_of(1, lane_size=3)
    items = [waiting(f"m{number}", TARGETS[0]) for number in range(5)]
    for item in items:
        lanes.put(item)
    assert lanes.take_excess(TARGETS[0]) == [items[4], items[3]]


def test_many_long_lanes_keep_their_share():
    """C5: beyond the total size each lane keeps its share of it."""
    lanes = lanes_of(1, lane_size=100, total_size=20)
    for target in TARGETS:
        for number in range(10):
            lanes.put(waiting(f"{target}{number}", target))
    for target in TARGETS:
        lanes.take_excess(target)
    assert [lanes.waiting_for(target) for target in TARGETS] == [5] * 4
    assert lanes.waiting == 20


@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.booleans()), min_size=1, max_size=100),
    st.floats(0.5, 100),
    st.integers(1, 3),
)
def test_a_rate_is_kept_over_both_paths_together(arriving, rate, slots):
    """C10: calls to one target over both paths are never closer than 1 / rate, and each path
    completes."""
    pacer = CallPacer(lambda _target: rate)
    paths = [lanes_of(slots, pacer=pacer) for _ in range(2)]
    now_s, called_s = 0.0, []

    def admit():
        for path in paths:
            while some := path.admit(now_s):
                called_s.extend(now_s for _item in some)
                for item in some:
                    path.free_slot(item.callback.target)

    for number, (passed_s, aside) in enumerate(arriving):
        now_s += passed_s
        paths[aside].put(waiting(f"m{number}", TARGETS[0]))
        admit()
    while any(path.waiting for path in paths):
        now_s = max(now_s, min(at_s for path in paths if (at_s := path.next_paced_s()) is not None))
        admit()
    assert len(called_s) == len(arriving)
    for earlier_s, later_s in itertools.pairwise(called_s):
        assert later_s - earlier_s >= 1 / rate * (1 - 1e-5)


def test_paths_alternate_at_a_target_with_a_rate():
    """C10: neither path starves the other, however late the timer is."""
    pacer = CallPacer(lambda _target: 10.0)
    paths = {name: lanes_of(5, pacer=pacer) for name in ("normal", "diverted")}
    for number in range(20):
        for name, path in paths.items():
            path.put(waiting(f"{name} {number}", TARGETS[0]))
    called = []
    for turn in range(12):
        # The timer is late by half an interval each time.
        for path in paths.values():
            for item in path.admit(turn * 0.15):
                called.append(item.callback.id.split()[0])
                path.free_slot(TARGETS[0])
    assert called[:6] == ["normal", "diverted"] * 3


def test_a_path_without_a_slot_does_not_starve_the_other():
    """C10: the diverted path waits for a slot of the pacer, but its only connection slot is
    used by a call that hangs.

    The normal path yields one slot and then goes on.
    """
    pacer = CallPacer(lambda target: 4.0 if target == TARGETS[0] else None)
    normal, diverted = lanes_of(5, pacer=pacer), lanes_of(1, pacer=pacer)
    for number in range(100):
        normal.put(waiting(f"n{number}", TARGETS[0]))
    assert len(normal.admit(0.0)) == 1
    diverted.put(waiting("aside", TARGETS[0]))
    assert diverted.admit(0.0) == []
    diverted.put(waiting("hangs", TARGETS[1]))
    assert len(diverted.admit(0.0)) == 1
    normal.free_slot(TARGETS[0])
    called_s = []
    for tick in range(1, 101):
        for _item in normal.admit(tick / 8):
            called_s.append(tick / 8)
            normal.free_slot(TARGETS[0])
        assert diverted.admit(tick / 8) == []
    assert len(called_s) >= 48
    assert called_s[0] == 0.5


@given(
    st.lists(st.tuples(st.sampled_from(["bound", "free"]), st.floats(0, 0.2)), min_size=1, max_size=100),
    st.sampled_from([None, 4.0, 30.0]),
)
def test_the_rate_of_a_path_does_not_limit_the_other_path(asks, rate):
    """C10: the calls of a path with ten per second are a tenth of a second apart.

    The other path has the target's own rate, and both together keep to that.
    """
    pacer, now_s = CallPacer(lambda _target: rate), 0.0
    called_s = {"bound": [], "free": []}
    for path, passed_s in asks:
        now_s += passed_s
        at_s = pacer.acquire(TARGETS[0], path, now_s, 10.0 if path == "bound" else None)
        if at_s is None:
            called_s[path].append(now_s)
        else:
            assert at_s > now_s
            assert rate or path == "bound"
    for earlier_s, later_s in itertools.pairwise(called_s["bound"]):
        assert later_s - earlier_s >= 0.1 * (1 - 1e-5)
    if rate:
        for earlier_s, later_s in itertools.pairwise(sorted(called_s["bound"] + called_s["free"])):
            assert later_s - earlier_s >= 1 / rate * (1 - 1e-5)


def test_a_short_spike_of_durations_defers_no_callback():
    """C5: 2,500 callbacks wait for a target that answers in 5 ms.

    One round of eight calls of 200 ms, because this process was busy, defers none. Five seconds
    of them defer most.
    """
    lanes = lanes_of(100, 8)
    for number in range(2500):
        lanes.put(waiting(f"c{number}", TARGETS[0]))

    def round_of(took_s):
        for item in lanes.admit():
            lanes.start(item)
        for _ in range(8):
            lanes.finish(TARGETS[0], took_s)
        return len(lanes.take_excess(TARGETS[0]))

    assert round_of(0.005) == 0
    assert round_of(0.2) == 0
    gone = sum(round_of(0.2) for _ in range(25))
    assert gone > 1000


def test_an_unused_slot_goes_to_the_next_lane():
    """C5: two lanes are set aside while few slots are free; the first one is empty when a slot
    becomes free."""
    lanes = lanes_of(8)
    for number in range(10):
        lanes.put(waiting(f"a{number}", TARGETS[0]))
    assert len(lanes.admit()) == 6
    for number in range(2):
        lanes.put(waiting(f"b{number}", TARGETS[1]))
    assert [item.callback.id for item in lanes.admit()] == ["b0"]
    lanes.take_waiting(lambda _waiting: True, TARGETS[0])
    lanes.free_slot(TARGETS[0])
    lanes.free_slot(TARGETS[0])
    assert [item.callback.id for item in lanes.admit()] == ["b1"]


def test_lanes_keep_the_rate_of_their_path():
    """C10: a path with two calls per second calls twice a second, then freely."""
    most = 2.0
    lanes = lanes_of(10, 5, max_rate=lambda _target: most, longest_wait_s=1)
    for number in range(10):
        lanes.put(waiting(f"c{number}", TARGETS[0]))
    assert [len(lanes.admit(at_s)) for at_s in (0.0, 0.1, 0.5, 0.6)] == [1, 0, 1, 0]
    assert lanes.next_paced_s() == pytest.approx(1.0)
    assert len(lanes.take_excess(TARGETS[0])) == 3
    most = None
    assert len(lanes.admit(1.0)) == 3


@given(before=st.floats(0.001, 1), after=st.one_of(st.none(), st.floats(0.5, 100)), passed_s=st.floats(0, 3))
def test_a_new_rate_counts_at_once(before, after, passed_s):
    """C8: a rate that is raised or removed applies at once; the next call follows one interval
    after the change at most."""
    rate = before
    pacer = CallPacer(lambda _target: rate)
    lanes = lanes_of(10, pacer=pacer)
    for number in range(3):
        lanes.put(waiting(f"c{number}", TARGETS[0]))
    assert len(lanes.admit(100.0)) == 1
    assert not lanes.admit(100.0 + min(passed_s, 0.9 / before))
    now_s, rate = 100.0 + passed_s, after
    lanes.rate_changed(TARGETS[0])
    lanes.rate_changed(TARGETS[1])
    if after is None:
        assert len(lanes.admit(now_s)) == 2
    else:
        lanes.admit(now_s)
        assert lanes.waiting == 0 or lanes.next_paced_s() <= now_s + 1 / after + 1e-9
        assert lanes.waiting <= 2


def test_schedules_of_the_pacer_expire():
    """C10: a schedule is kept while it can delay a call or order the paths."""
    pacer = CallPacer(lambda _target: 10.0)
    for number in range(1000):
        assert pacer.acquire(f"http://t{number}/", "path", 0.0) is None
    assert len(pacer) == 1000
    pacer.acquire(TARGETS[0], "path", 1000.0)
    assert len(pacer) == 1
    bound = CallPacer()
    assert bound.acquire(TARGETS[0], "path", 0.0, 0.01) is None
    # A schedule by the target's own rate would have expired.
    assert bound.acquire(TARGETS[0], "path", 80.0, 0.01) == pytest.approx(100.0)
    assert bound.acquire(TARGETS[1], "path", 200.0, 0.01) is None
    assert len(bound) == 1


def test_the_targets_of_a_host_share_its_slots():
    """C5: a host that has not answered has as many slots as two targets, by any number of URLs."""
    lanes = lanes_of(100, 2, host_slots=10, untrusted_slots=4, server_slots=6)
    targets = [TargetId("acme", f"http://192.0.2.1/cb?n={number}") for number in range(50)]
    for number, target in enumerate(targets):
        lanes.put(waiting(f"m{number}", target))
    other = waiting("other", TargetId("acme", "http://192.0.2.2/"))
    admitted = lanes.admit()
    assert [item.callback.id for item in admitted] == ["m0", "m1", "m2", "m3"]
    lanes.put(other)
    assert lanes.admit() == [other]
    call(lanes, admitted[0], 1.0)
    assert [item.callback.id for item in lanes.admit()] == ["m4"]


def test_the_untrusted_hosts_of_a_server_share_its_slots():
    """C5: ports and names of one server gain no slots, and a trusted host at it does not wait."""
    hosts = Hosts(CallbacksSettings())
    lanes = lanes_of(100, 2, untrusted_slots=4, server_slots=6, host_of=hosts.of, servers_of=hosts.servers_of)
    hosts.resolved("one.example", ["192.0.2.1", "2001:db8::1"])
    urls = [f"http://192.0.2.1:{port}/" for port in range(1, 9)] + [
        "http://one.example/",
        "http://[2001:db8::2]/",
    ]
    for number, url in enumerate(urls):
        lanes.put(waiting(f"m{number}", TargetId("acme", url)))
    admitted = lanes.admit()
    # The last one uses another server's /64 that the name uses, too.
    assert [item.callback.id for item in admitted] == [*(f"m{number}" for number in range(6)), "m9"]
    trusted = TargetId("acme", "http://192.0.2.1:9999/")
    hosts.of(trusted).trusted = True
    lanes.put(waiting("trusted", trusted))
    assert [item.callback.id for item in lanes.admit()] == ["trusted"]
    for item in admitted:
        call(lanes, item, 1.0)
    assert {item.callback.id for item in lanes.admit()} == {"m6", "m7", "m8"}


def test_an_answering_target_has_slots_apart_from_unresponsive_ones():
    """C5: unresponsive calls hold all slots of their host, and no call of a neighbour is under way
    whose answer could show that the host answers."""
    answers, waits = (TargetId("acme", f"http://192.0.2.1/{name}") for name in ("answers", "waits"))
    trusted = {answers}
    lanes = lanes_of(100, 2, host_slots=10, untrusted_slots=4, is_trusted=trusted.__contains__)
    unresponsive = [waiting(f"h{n}", TargetId("acme", f"http://192.0.2.1/hang{n % 2}")) for n in range(8)]
    for item in unresponsive:
        lanes.put(item)
    assert lanes.admit() == [unresponsive[n] for n in (0, 1, 2, 3)]
    items = [waiting(f"a{n}", answers) for n in range(2)]
    for item in items:
        lanes.put(item)
    assert lanes.admit() == items
    # A target that has not answered yet waits with those that hang.
    lanes.put(waiting("w", waits))
    assert lanes.admit() == []


def test_a_lane_that_waits_goes_on_when_its_target_has_answered():
    """C5: the first answer of a target frees its other callbacks from the slots of its host."""
    target, hangs = TargetId("acme", "http://192.0.2.1/answers"), TargetId("acme", "http://192.0.2.1/hangs")
    trusted = set()
    lanes = lanes_of(100, 3, host_slots=10, untrusted_slots=4, is_trusted=trusted.__contains__)
    first, *others = [waiting(f"a{n}", target) for n in range(3)]
    lanes.put(first)
    assert lanes.admit() == [first]
    unresponsive = [waiting(f"h{n}", hangs) for n in range(3)]
    for item in unresponsive:
        lanes.put(item)
    assert lanes.admit() == unresponsive
    for item in others:
        lanes.put(item)
    assert lanes.admit() == []
    trusted.add(target)
    call(lanes, first, 0.1)
    assert lanes.admit() == others


def test_lanes_of_a_host_that_leave_give_way():
    """C5: a lane behind many lanes that were emptied is still called."""
    lanes = lanes_of(100, 1, untrusted_slots=1, server_slots=100)
    targets = [TargetId("acme", f"http://192.0.2.1/{number}") for number in range(20)]
    for number, target in enumerate(targets):
        lanes.put(waiting(f"m{number}", target))
    [first] = lanes.admit()
    lanes.take_waiting(lambda item: item.callback.id != "m19")
    call(lanes, first, 1.0)
    assert [item.callback.id for item in lanes.admit()] == ["m19"]


@pytest.mark.parametrize("trusted", [False, True])
def test_no_namespace_takes_all_slots(trusted):
    """C5, O5: however many addresses a namespace calls, the next one finds slots at once."""
    hosts = Hosts(CallbacksSettings())
    lanes = lanes_of(500, 8, host_slots=200, untrusted_slots=16, server_slots=62, host_of=hosts.of)
    for number in range(3000):
        target = TargetId("acme", f"http://192.0.2.{number % 64}/cb?n={number}")
        hosts.of(target).trusted = trusted
        lanes.put(waiting(f"a{number}", target))
    assert len(lanes.admit()) == lanes.slots_in_use == 437
    for name in ("beta", "gamma"):
        others = [waiting(f"{name}{n}", TargetId(name, f"http://198.51.100.1/{n}")) for n in range(8)]
        for item in others:
            lanes.put(item)
        assert lanes.admit() == others


def test_unresponsive_targets_of_a_namespace_leave_a_slot():
    """C5, O5: probes of another namespace's target begin although one namespace's addresses
    hang."""
    settings = CallbacksSettings()
    hosts = Hosts(settings)
    lanes = Lanes(
        settings.diverted_lane_bounds,
        host_of=hosts.of,
        servers_of=hosts.servers_of,
        is_unresponsive=lambda _target: True,
    )
    for number in range(16):
        lanes.put(waiting(f"a{number}", TargetId("acme", f"http://192.0.2.{number}/")))
    assert len(lanes.admit()) == 2
    probe = waiting("b", TargetId("beta", "http://198.51.100.1/"))
    lanes.put(probe)
    assert lanes.admit() == [probe]


def test_namespaces_share_the_slots():
    """C5, O5: a backlog of one namespace delays no callback of another, and both soon have as many
    calls under way."""
    lanes = lanes_of(8, 1)
    for number in range(1000):
        lanes.put(waiting(f"a{number}", TargetId("acme", f"http://192.0.2.1/{number}")))
    under_way = lanes.admit()
    other = waiting("b", TargetId("beta", "http://192.0.2.2/"))
    lanes.put(other)
    assert lanes.admit() == [other]
    for number in range(10):
        lanes.put(waiting(f"b{number}", TargetId("beta", f"http://192.0.2.2/{number}")))
    for _ in range(10):
        call(lanes, under_way.pop(0), 0.01)
        under_way += lanes.admit()
    used = Counter(item.callback.target.namespace for item in [*under_way, other])
    assert set(used.values()) <= {3, 4}, used


def test_lanes_of_a_namespace_share_its_slots_in_turn():
    """C5: a target that uses a slot does not keep it while others of its namespace wait."""
    lanes = lanes_of(5, 1)
    for number in range(18):
        lanes.put(waiting(f"m{number}", TargetId("acme", f"http://t{number % 6}/")))
    under_way, order = lanes.admit(), []
    assert len(under_way) == 4
    while under_way:
        item = under_way.pop(0)
        order.append(item.callback.target.url)
        call(lanes, item, 0.01)
        under_way += lanes.admit()
    assert len(order) == 18
    assert len(set(order[:6])) == 6, order
