"""Tracking of acknowledged offsets, compared with a naive model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.offset_tracker import SETTLED_PER_RECORD, Arrival, OffsetTracker, PartitionOffsets

P, Q = ("records", 0), ("records", 1)

# Steps: "take" the next record, or settle the record at an offset, in flight or not.
STEPS = st.lists(st.one_of(st.just("take"), st.integers(0, 25)), max_size=120)


@given(start=st.integers(0, 1_000), steps=STEPS)
def test_the_frontier_is_the_end_of_the_settled_prefix(start: int, steps: list[int | str]) -> None:
    """O1: exactly the settled prefix may be committed, for any order of settling."""
    sequence = PartitionOffsets(start)
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


def test_only_the_expected_record_is_accepted() -> None:
    """O1: the tracker distinguishes a repetition from a jump, and neither record gets in flight."""
    sequence = PartitionOffsets(5)
    assert sequence.arrive(4) is Arrival.REPEATED
    assert sequence.arrive(7) is Arrival.AHEAD
    assert sequence.arrive(5) is Arrival.NEXT
    assert sequence.arrive(5) is Arrival.REPEATED
    assert len(sequence) == 1


def test_a_gap_is_committed_with_the_record_before_it() -> None:
    """O1: deleted records do not block the frontier, and it does not pass unsettled records before
    them."""
    sequence = PartitionOffsets(0)
    sequence.arrive(0)
    sequence.skip_to(10)
    assert sequence.frontier == 0
    sequence.settle(0)
    assert sequence.frontier == 10
    assert sequence.arrive(10) is Arrival.NEXT


@given(limit=st.integers(1, 10), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80))
def test_records_in_flight_are_bounded(limit: int, steps: list[tuple[bool, int]]) -> None:
    """O1: a consumer that checks `full` first has at most `limit` unsettled records over all
    partitions, and at most ten times as many tracked records."""
    tracker = OffsetTracker(limit)
    unsettled = set()
    tracker.begin(1, {P: 0, Q: 0})
    for take, number in steps:
        partition = P if number % 2 else Q
        if take and not tracker.full:
            unsettled.add((partition, tracker.expected()[partition]))
            assert tracker.arrive(1, partition, tracker.expected()[partition]) is Arrival.NEXT
        elif not take:
            unsettled.discard((partition, number // 2))
            tracker.settle(1, partition, number // 2)
        in_flight = sum(
            tracker.expected()[p] - tracker.oldest().get(p, tracker.expected()[p]) for p in (P, Q)
        )
        assert len(tracker) == in_flight <= limit * SETTLED_PER_RECORD
        assert len(unsettled) <= limit


def test_settled_records_behind_an_unsettled_one_count() -> None:
    """O1, C5: ten settled records behind an unsettled one count as one more, which bounds
    memory."""
    tracker = OffsetTracker(3)
    tracker.begin(1, {P: 0})
    for offset in range(1 + 2 * SETTLED_PER_RECORD):
        assert not tracker.full
        tracker.arrive(1, P, offset)
        if offset:
            tracker.settle(1, P, offset)
    assert tracker.full
    assert tracker.committable() == {}
    tracker.settle(1, P, 0)
    assert len(tracker) == 0
    assert tracker.committable() == {P: 1 + 2 * SETTLED_PER_RECORD}


def test_an_old_generation_settles_nothing() -> None:
    """O1: after a rebalance, the next reader of a record owns it."""
    tracker = OffsetTracker(10)
    tracker.begin(1, {P: 0, Q: 0})
    tracker.arrive(1, P, 0)
    tracker.begin(2, {P: 0})
    assert len(tracker) == 0
    tracker.settle(1, P, 0)
    assert tracker.arrive(1, P, 0) is Arrival.FOREIGN, "a record of the old generation"
    assert tracker.arrive(2, Q, 0) is Arrival.FOREIGN, "a revoked partition"
    assert tracker.arrive(2, P, 0) is Arrival.NEXT
    tracker.settle(1, P, 0)
    assert tracker.committable() == {}
    tracker.settle(2, P, 0)
    assert tracker.committable() == {P: 1}


def test_only_moved_offsets_are_committed() -> None:
    """O1: an idle partition is not committed repeatedly."""
    tracker = OffsetTracker(10)
    tracker.begin(1, {P: 7, Q: 0})
    assert tracker.committable() == {}
    tracker.arrive(1, P, 7)
    tracker.settle(1, P, 7)
    tracker.committed({P: 8})
    assert tracker.committable() == {}
