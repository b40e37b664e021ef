"""Acknowledging in order, against a naive model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.acknowledgement import SETTLED_WEIGH, Arrival, Hand, Sequence

P, Q = ("records", 0), ("records", 1)

# What may happen: "take" the next record, or settle the record of some offset, in hand or not.
STEPS = st.lists(st.one_of(st.just("take"), st.integers(0, 25)), max_size=120)


@given(start=st.integers(0, 1_000), steps=STEPS)
def test_the_frontier_is_the_end_of_the_settled_prefix(start: int, steps: list[int | str]) -> None:
    """O1: whatever the order of settling, exactly the settled prefix may be committed."""
    sequence = Sequence(start)
    taken: list[int] = []
    settled: set[int] = set()
    for step in steps:
        if step == "take":
            assert sequence.arrive(sequence.expected) is Arrival.NEXT
            taken.append(start + len(taken))
        else:
            offset = start + int(step)
            before = sequence.frontier
            moved = sequence.settle(offset)
            if offset in taken:
                settled.add(offset)
            assert moved == sequence.frontier - before
        prefix = 0
        while prefix < len(taken) and taken[prefix] in settled:
            prefix += 1
        assert sequence.frontier == start + prefix
        assert len(sequence) == len(taken) - prefix
        assert sequence.expected == start + len(taken)


@given(order=st.permutations(range(30)))
def test_any_order_of_settling_ends_with_everything_acknowledged(order: list[int]) -> None:
    """O1: nothing stays in hand once all is settled."""
    sequence = Sequence(0)
    for offset in range(30):
        sequence.arrive(offset)
    assert sum(sequence.settle(offset) for offset in order) == 30
    assert (sequence.frontier, len(sequence)) == (30, 0)


def test_only_the_record_expected_is_taken() -> None:
    """O1: a repetition and a jump are told apart, and neither comes in hand."""
    sequence = Sequence(5)
    assert sequence.arrive(4) is Arrival.REPEATED
    assert sequence.arrive(7) is Arrival.AHEAD
    assert sequence.arrive(5) is Arrival.NEXT
    assert sequence.arrive(5) is Arrival.REPEATED
    assert len(sequence) == 1


def test_a_gap_without_records_is_committed_with_what_is_before_it() -> None:
    """O1: deleted records hold nothing up, but nothing unsettled before them is passed."""
    sequence = Sequence(0)
    sequence.arrive(0)
    sequence.skip_to(10)
    assert sequence.frontier == 0
    sequence.settle(0)
    assert sequence.frontier == 10
    assert sequence.arrive(10) is Arrival.NEXT


@given(limit=st.integers(1, 10), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80))
def test_the_bound_is_respected(limit: int, steps: list[tuple[bool, int]]) -> None:
    """O1: who asks `full` first never has more than `limit` in hand, over all partitions together, and of what is
    settled behind others never more than ten times as many."""
    hand = Hand(limit)
    unsettled = set()
    hand.begin(1, {P: 0, Q: 0})
    for take, number in steps:
        partition = P if number % 2 else Q
        if take and not hand.full:
            unsettled.add((partition, hand.expected()[partition]))
            assert hand.arrive(1, partition, hand.expected()[partition]) is Arrival.NEXT
        elif not take:
            unsettled.discard((partition, number // 2))
            hand.settle(1, partition, number // 2)
        in_hand = sum(hand.expected()[p] - hand.held().get(p, hand.expected()[p]) for p in (P, Q))
        assert len(hand) == in_hand <= limit * SETTLED_WEIGH
        assert len(unsettled) <= limit


def test_what_is_settled_behind_a_record_in_hand_still_counts() -> None:
    """O1, C5: ten that are held back behind one count as one more: they fill the hand in the end, instead of memory."""
    hand = Hand(3)
    hand.begin(1, {P: 0})
    for offset in range(1 + 2 * SETTLED_WEIGH):
        assert not hand.full
        hand.arrive(1, P, offset)
        if offset:
            hand.settle(1, P, offset)
    assert hand.full
    assert hand.committable() == {}
    hand.settle(1, P, 0)
    assert len(hand) == 0
    assert hand.committable() == {P: 1 + 2 * SETTLED_WEIGH}


def test_an_old_generation_settles_nothing() -> None:
    """O1: what was in hand at a rebalance belongs to whoever reads it again."""
    hand = Hand(10)
    hand.begin(1, {P: 0, Q: 0})
    hand.arrive(1, P, 0)
    hand.begin(2, {P: 0})
    assert len(hand) == 0
    hand.settle(1, P, 0)
    assert hand.arrive(1, P, 0) is Arrival.FOREIGN, "a record of the old generation"
    assert hand.arrive(2, Q, 0) is Arrival.FOREIGN, "a partition that was given away"
    assert hand.arrive(2, P, 0) is Arrival.NEXT
    hand.settle(1, P, 0)
    assert hand.committable() == {}
    hand.settle(2, P, 0)
    assert hand.committable() == {P: 1}


def test_only_what_has_moved_is_committed() -> None:
    """O1: an idle partition is not committed over and over."""
    hand = Hand(10)
    hand.begin(1, {P: 7, Q: 0})
    assert hand.committable() == {}
    hand.arrive(1, P, 7)
    hand.settle(1, P, 7)
    hand.committed({P: 8})
    assert hand.committable() == {}
