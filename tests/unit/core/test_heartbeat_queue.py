"""The queues of heartbeats: every attempt is beaten, within the rate, for any answers."""

from collections import Counter, defaultdict
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.memory import growth_bytes

from penstock.core import heartbeat_queue
from penstock.core.heartbeat_queue import Answer, HeartbeatPolicy, HeartbeatQueue

POLICY = HeartbeatPolicy(timeout_s=50, cycle_s=20, step_s=1, rate_per_s=1, limit_per_s=5)


def beat(queue, now_s, answer=Answer.CONFIRMED):
    sent = queue.step(now_s)
    for key in sent:
        queue.answer(key, answer, now_s)
    return sent


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"cycle_s": 150}, "must fit twice"),
        ({"cycle_s": 0}, "cycle_s=0 must be above 0"),
        ({"limit_per_s": 0.5}, "must allow rate_per_s=1"),
        ({"retries": -1}, "retries=-1"),
    ],
)
def test_a_contradicting_policy_is_refused(given_, words):
    """H2: settings that do not fit together are refused."""
    [problem] = HeartbeatPolicy(**given_).validate()
    assert words in problem


@pytest.mark.parametrize("timeout_s", [0.5, 3, 30, 300, 86_400])
def test_the_default_proportions_fit_every_timeout(timeout_s):
    """H1, H2: the defaults scale with the timeout, such as a cycle of 120 s for 300 s."""
    assert HeartbeatPolicy.within(timeout_s).validate() == []
    assert HeartbeatPolicy.within(300) == HeartbeatPolicy()


def test_recently_claimed_attempts_are_not_beaten():
    """H5: a beat is sent only after an idle interval since the claim, and since the beat before."""
    queue = HeartbeatQueue(POLICY, 0)
    queue.add("a", 9)
    assert [beat(queue, now) for now in range(10, 19)] == [[]] * 9
    assert beat(queue, 19) == ["a"]
    assert [beat(queue, now) for now in range(20, 29)] == [[]] * 9
    assert "a" in [key for now in range(29, 42) for key in beat(queue, now)]


def test_the_most_overdue_attempts_come_first_within_the_limit():
    """H4: a stall causes no burst of beats."""
    queue = HeartbeatQueue(POLICY, 0)
    for number in range(50):
        queue.add(number, number / 100)
    assert beat(queue, 1_000) == [0, 1, 2, 3, 4]
    assert beat(queue, 1_001) == [5, 6, 7, 8, 9]
    assert beat(queue, 1_001.1) == []


def test_throttled_beats_come_next_and_unknown_ones_last():
    """H3: each class of errors has its place in the queues."""
    queue = HeartbeatQueue(POLICY, 0)
    for key in "abc":
        queue.add(key, 0)
    assert queue.step(11) == ["a", "b", "c"]
    queue.answer("a", Answer.UNKNOWN, 11)
    queue.answer("b", Answer.GONE, 11)
    queue.answer("c", Answer.THROTTLED, 11)
    queue.add("d", 0)
    assert "b" not in queue
    assert queue.step(12) + queue.step(13) == ["c", "d", "a"]


def test_repeated_unknown_errors_wait_for_the_next_cycle():
    """H3: no attempt is dropped, and none delays the other attempts."""
    queue = HeartbeatQueue(POLICY, 0)
    queue.add("a", 0)
    tries = [now for now in range(1, 20) if beat(queue, now, Answer.UNKNOWN)]
    assert tries == [10, 11, 12, 13]
    assert beat(queue, 20) == ["a"]


def test_a_beat_is_not_repeated_before_its_answer_or_a_cycle():
    """H3: several beats may be in flight, but at most one for each attempt."""
    queue = HeartbeatQueue(POLICY, 0)
    queue.add("a", 0)
    assert queue.step(15) == ["a"]
    assert queue.step(20) == []
    assert queue.step(40) == ["a"]
    queue.answer("a", Answer.CONFIRMED, 40)
    queue.answer("a", Answer.GONE, 40)
    assert "a" in queue


def test_the_room_is_the_capacity_of_the_policy():
    """H2: the capacity is rate times cycle."""
    queue = HeartbeatQueue(POLICY, 0)
    assert queue.room == POLICY.capacity == 100
    queue.add("a", 0)
    assert queue.room == 99
    queue.discard(["a", "b"])
    assert queue.room == 100


STEPS = st.lists(
    st.tuples(
        st.integers(0, 30),  # attempts claimed
        st.integers(0, 20),  # attempts ended
        st.booleans(),  # the step is late by almost a step
    ),
    min_size=1,
    max_size=150,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_every_attempt_is_beaten_within_the_limit(steps):
    """H1, H2: compared with a model of the last contact of each attempt."""
    queue = HeartbeatQueue(POLICY, 0)
    last_contact = {}
    now = number = 0.0
    for claimed, ended, late in [*steps, *[(0, 0, False)] * 60]:
        now += POLICY.step_s * (1.9 if late else 1)
        for _ in range(min(claimed, queue.room)):
            number += 1
            queue.add(number, now)
            last_contact[number] = now
        for key in list(last_contact)[:ended]:
            queue.discard([key])
            del last_contact[key]
        sent = beat(queue, now)
        assert len(sent) <= POLICY.limit_per_s * POLICY.step_s
        assert len(set(sent)) == len(sent)
        last_contact.update(dict.fromkeys(sent, now))
        assert len(queue) == len(last_contact)
        longest = max((now - at for at in last_contact.values()), default=0)
        assert longest <= 2 * (POLICY.cycle_s + POLICY.step_s), "an attempt was missed"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 80),
    st.lists(st.lists(st.sampled_from([*Answer, None]), max_size=8), min_size=1, max_size=80),
)
def test_every_attempt_is_in_exactly_one_queue(count, answers):
    """H3: for any answers, each attempt is beaten again within two cycles, unless it is gone."""
    queue = HeartbeatQueue(POLICY, 0)
    present = set(range(count))
    for key in present:
        queue.add(key, 0)
    now = 0.0
    for batch in answers:
        now += 1
        sent = queue.step(now)
        assert set(sent) <= present
        assert max(Counter(sent).values(), default=0) <= 1
        for key, answer in zip(sent, batch, strict=False):
            if answer is not None:
                queue.answer(key, answer, now)
            if answer is Answer.GONE:
                present.discard(key)
    assert len(queue) == len(present)
    missing = set(present)
    for _ in range(int(3 * POLICY.cycle_s)):
        now += 1
        missing -= set(beat(queue, now))
    assert not missing, "an attempt is in no queue"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(
        st.tuples(st.integers(0, 3 * int(POLICY.cycle_s)), st.sampled_from(Answer)), min_size=1, max_size=50
    ),
)
def test_late_answers_count_only_for_their_own_beats(count, outcomes):
    """W6, H3: compared with a model of beats in flight and the time of each confirmed beat."""
    queue = HeartbeatQueue(POLICY, 0)
    last_contact = dict.fromkeys(range(count), 0)
    for key in last_contact:
        queue.add(key, 0)
    in_flight = {}
    answers_due = defaultdict(list)
    next_outcome = cycle(outcomes)
    for now in range(1, 8 * int(POLICY.cycle_s)):
        if now % POLICY.cycle_s == 0:
            in_flight = {key: at for key, at in in_flight.items() if at > now - POLICY.cycle_s}
        sent = queue.step(now)
        assert not in_flight.keys() & set(sent), "sent again while in flight"
        in_flight |= dict.fromkeys(sent, now)
        for key in sent:
            delay, answer = next(next_outcome)
            answers_due[now + delay].append((key, answer, now))
        for key, answer, sent_at in answers_due.pop(now, []):
            queue.answer(key, answer, sent_at)
            if in_flight.get(key) != sent_at:
                continue  # abandoned since
            del in_flight[key]
            if answer is Answer.CONFIRMED:
                last_contact[key] = sent_at
            elif answer is Answer.GONE:
                del last_contact[key]
        assert len(queue) == len(last_contact)
        for age in {now - at for at in last_contact.values()}:
            assert set(queue.silent(now, age)) == {key for key, at in last_contact.items() if now - at >= age}


def test_memory_goes_with_the_attempts_in_flight():
    """H11: short attempts of a type with a lease of a day leave nothing behind."""
    queue = HeartbeatQueue(HeartbeatPolicy.within(86_400), 0)
    queue.add("a long attempt", 0)

    def work(number):
        queue.add(number, number / 1000)
        queue.discard([number - 10])
        if number % 1000 == 0:
            beat(queue, number / 1000)

    assert growth_bytes(work) < 50_000
    assert len(queue) == 1 + 10


KEYS = st.integers(0, 5)
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), KEYS),
    st.tuples(st.just("discard"), st.lists(KEYS, max_size=4)),
    st.tuples(st.just("step"), st.lists(st.sampled_from([*Answer, None]), max_size=6)),
    st.tuples(st.just("pass"), st.integers(1, 15)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=60))
def test_compaction_changes_no_heartbeat(operations):
    """H1, H3: compared with a queue that keeps its stale entries, for any order of events."""

    def sent(few_entries):
        queue, now, steps = HeartbeatQueue(POLICY, 0), 0, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heartbeat_queue, "FEW_ENTRIES", few_entries)
            for name, given_ in operations:
                if name == "add" and given_ not in queue:
                    queue.add(given_, now)
                elif name == "discard":
                    queue.discard(given_)
                elif name == "pass":
                    now += given_
                elif name == "step":
                    now += 1
                    due = queue.step(now)
                    steps.append(due)
                    for key, answer in zip(due, given_, strict=False):
                        if answer is not None:
                            queue.answer(key, answer, now)
        return steps

    assert sent(0) == sent(10**9)
