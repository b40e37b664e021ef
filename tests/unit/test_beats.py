"""The two queues of signs of life: nobody missed, never above the rate, whatever comes of the beats."""

from collections import Counter, defaultdict
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.beats import Answer, BeatPolicy, BeatQueue

POLICY = BeatPolicy(timeout_s=50, cycle_s=20, step_s=1, rate_per_s=1, limit_per_s=5)


def beat(queue, now_s, answer=Answer.HEARD):
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
def test_a_policy_that_cannot_keep_its_promise_is_refused(given_, words):
    """H2: the settings are checked together."""
    [problem] = BeatPolicy(**given_).validate()
    assert words in problem


@pytest.mark.parametrize("timeout_s", [0.5, 3, 30, 300, 86_400])
def test_the_usual_proportions_fit_every_timeout(timeout_s):
    """H1, H2: a cycle of 120 s in 300 s, and the like."""
    assert BeatPolicy.within(timeout_s).validate() == []
    assert BeatPolicy.within(300) == BeatPolicy()


def test_what_was_heard_of_is_not_beaten():
    """H5: a beat is sent only after an idle interval since the claim, and since the beat before."""
    queue = BeatQueue(POLICY, 0)
    queue.add("a", 9)
    assert [beat(queue, now) for now in range(10, 19)] == [[]] * 9
    assert beat(queue, 19) == ["a"]
    assert [beat(queue, now) for now in range(20, 29)] == [[]] * 9
    assert "a" in [key for now in range(29, 42) for key in beat(queue, now)]


def test_the_most_overdue_come_first_and_no_faster_than_the_limit():
    """H4: after a standstill there is no burst."""
    queue = BeatQueue(POLICY, 0)
    for number in range(50):
        queue.add(number, number / 100)
    assert beat(queue, 1_000) == [0, 1, 2, 3, 4]
    assert beat(queue, 1_001) == [5, 6, 7, 8, 9]
    assert beat(queue, 1_001.1) == []


def test_throttled_come_next_and_unknown_last():
    """H3: each class of errors goes to its place."""
    queue = BeatQueue(POLICY, 0)
    for key in "abc":
        queue.add(key, 0)
    assert queue.step(11) == ["a", "b", "c"]
    queue.answer("a", Answer.UNKNOWN, 11)
    queue.answer("b", Answer.GONE, 11)
    queue.answer("c", Answer.THROTTLED, 11)
    queue.add("d", 0)
    assert "b" not in queue
    assert queue.step(12) + queue.step(13) == ["c", "d", "a"]


def test_after_so_many_unknown_errors_an_attempt_waits_for_the_next_cycle():
    """H3: no attempt is given up, and none takes the others' turns."""
    queue = BeatQueue(POLICY, 0)
    queue.add("a", 0)
    tries = [now for now in range(1, 20) if beat(queue, now, Answer.UNKNOWN)]
    assert tries == [10, 11, 12, 13]
    assert beat(queue, 20) == ["a"]


def test_a_beat_is_guarded_until_it_is_answered_or_a_cycle_has_passed():
    """H3: several sends may be in flight, none twice."""
    queue = BeatQueue(POLICY, 0)
    queue.add("a", 0)
    assert queue.step(15) == ["a"]
    assert queue.step(20) == []
    assert queue.step(40) == ["a"]
    queue.answer("a", Answer.HEARD, 40)
    queue.answer("a", Answer.GONE, 40)
    assert "a" in queue


def test_a_late_answer_counts_as_of_when_the_beat_was_sent():
    """W6: what was heard long ago must not look like contact now."""
    queue = BeatQueue(POLICY, 0)
    queue.add("a", 0)
    queue.step(12)
    queue.answer("a", Answer.HEARD, 12)
    assert queue.silent(42, 30) == ["a"]
    assert queue.silent(41, 30) == []


def test_an_answer_to_a_beat_given_up_says_nothing_of_the_one_after_it():
    """W6, H3: neither that it was heard, nor that it was not."""
    queue = BeatQueue(POLICY, 0)
    queue.add("a", 0)
    assert (queue.step(15), queue.step(40)) == (["a"], ["a"])
    for answer in Answer:
        queue.answer("a", answer, 15)
    assert queue.silent(40, 40) == ["a"]
    assert queue.step(41) == [], "the one after it is still under way"
    queue.answer("a", Answer.HEARD, 40)
    assert queue.silent(41, 2) == []


def test_there_is_room_for_what_can_be_kept_alive():
    """H2: capacity is rate times cycle."""
    queue = BeatQueue(POLICY, 0)
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
def test_nobody_is_missed_and_no_step_is_above_the_limit(steps):
    """H1, H2: against the plainest of models: when was each heard of last?"""
    queue = BeatQueue(POLICY, 0)
    heard = {}
    now = number = 0.0
    for claimed, ended, late in [*steps, *[(0, 0, False)] * 60]:
        now += POLICY.step_s * (1.9 if late else 1)
        for _ in range(min(claimed, queue.room)):
            number += 1
            queue.add(number, now)
            heard[number] = now
        for key in list(heard)[:ended]:
            queue.discard([key])
            del heard[key]
        sent = beat(queue, now)
        assert len(sent) <= POLICY.limit_per_s * POLICY.step_s
        assert len(set(sent)) == len(sent)
        heard.update(dict.fromkeys(sent, now))
        assert len(queue) == len(heard)
        longest = max((now - at for at in heard.values()), default=0)
        assert longest <= 2 * (POLICY.cycle_s + POLICY.step_s), "somebody was missed"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 80),
    st.lists(st.lists(st.sampled_from([*Answer, None]), max_size=8), min_size=1, max_size=80),
)
def test_any_errors_in_any_order_keep_everybody_in_exactly_one_place(count, answers):
    """H3: whatever comes of the beats, each attempt is beaten again within two cycles, unless it is gone."""
    queue = BeatQueue(POLICY, 0)
    there = set(range(count))
    for key in there:
        queue.add(key, 0)
    now = 0.0
    for batch in answers:
        now += 1
        sent = queue.step(now)
        assert set(sent) <= there
        assert max(Counter(sent).values(), default=0) <= 1
        for key, answer in zip(sent, batch, strict=False):
            if answer is not None:
                queue.answer(key, answer, now)
            if answer is Answer.GONE:
                there.discard(key)
    assert len(queue) == len(there)
    missing = set(there)
    for _ in range(int(3 * POLICY.cycle_s)):
        now += 1
        missing -= set(beat(queue, now))
    assert not missing, "somebody is in no queue"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(
        st.tuples(st.integers(0, 3 * int(POLICY.cycle_s)), st.sampled_from(Answer)), min_size=1, max_size=50
    ),
)
def test_answers_however_late_count_for_their_own_beat_only(count, fates):
    """W6, H3: against the plainest of models: which beats are under way, and when was sent what was heard?"""
    queue = BeatQueue(POLICY, 0)
    heard = dict.fromkeys(range(count), 0)
    for key in heard:
        queue.add(key, 0)
    under_way = {}
    coming = defaultdict(list)
    fate = cycle(fates)
    for now in range(1, 8 * int(POLICY.cycle_s)):
        if now % POLICY.cycle_s == 0:
            under_way = {key: at for key, at in under_way.items() if at > now - POLICY.cycle_s}
        sent = queue.step(now)
        assert not under_way.keys() & set(sent), "sent again while it was under way"
        under_way |= dict.fromkeys(sent, now)
        for key in sent:
            delay, answer = next(fate)
            coming[now + delay].append((key, answer, now))
        for key, answer, sent_at in coming.pop(now, []):
            queue.answer(key, answer, sent_at)
            if under_way.get(key) != sent_at:
                continue  # given up since
            del under_way[key]
            if answer is Answer.HEARD:
                heard[key] = sent_at
            elif answer is Answer.GONE:
                del heard[key]
        assert len(queue) == len(heard)
        for age in {now - at for at in heard.values()}:
            assert set(queue.silent(now, age)) == {key for key, at in heard.items() if now - at >= age}
