"""Admission of submissions while PostgreSQL is behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.admission import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    Admission,
    AdmissionLimits,
    PartitionLoad,
    RefusalCause,
    partitions_to_pause,
)

LIMITS = AdmissionLimits(rows=100, size_bytes=10_000, wait_s=5.0)


def test_a_request_is_admitted_while_none_waits() -> None:
    """T5: one request is always admitted, however large. The body limit bounds its size."""
    assert Admission(LIMITS).refusal(1_000_000, 1_000_000, 0.0) is None


def test_each_limit_refuses_with_its_cause() -> None:
    """T5: rows and bytes bound the memory; the wait bounds the latency."""
    admission = Admission(LIMITS)
    ticket = admission.enter(60, 6_000, 0.0)
    assert admission.refusal(40, 4_000, 0.0) is None
    for rows, size_bytes, now_s, cause in (
        (41, 0, 0.0, RefusalCause.ROWS),
        (0, 4_001, 0.0, RefusalCause.BYTES),
        (1, 1, 5.1, RefusalCause.LATE),
    ):
        refusal = admission.refusal(rows, size_bytes, now_s)
        assert refusal is not None
        assert refusal.cause is cause
    admission.leave(ticket)
    assert admission.refusal(41, 4_001, 100.0) is None


def test_retry_after_grows_with_the_wait() -> None:
    """T5: the longer the database has been behind, the less often clients repeat their requests."""
    admission = Admission(LIMITS)
    admission.enter(100, 0, 0.0)
    delays_s = []
    for now_s in (0.0, 3.0, 12.0, 1_000.0):
        refusal = admission.refusal(1, 1, now_s)
        assert refusal is not None
        delays_s.append(refusal.retry_after_s)
    assert delays_s == [MIN_RETRY_AFTER_S, 3.0, 12.0, MAX_RETRY_AFTER_S]


def test_the_oldest_request_that_still_waits_counts() -> None:
    """T5: answering the oldest request shortens the wait; answering a younger one does not."""
    admission = Admission(LIMITS)
    first = admission.enter(1, 1, 0.0)
    second = admission.enter(1, 1, 4.0)
    admission.enter(1, 1, 6.0)
    admission.leave(second)
    assert admission.oldest_s(7.0) == 7.0
    admission.leave(first)
    assert admission.oldest_s(7.0) == 1.0


class Gateway(RuleBasedStateMachine):
    """Requests arrive, wait and are answered in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(LIMITS)
        self.model: dict[int, tuple[int, int]] = {}
        self.now_s = 0.0

    @rule(rows=st.integers(1, 60), size_bytes=st.integers(1, 6_000), elapsed_s=st.floats(0, 3))
    def request(self, rows: int, size_bytes: int, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        if self.admission.refusal(rows, size_bytes, self.now_s) is None:
            self.model[self.admission.enter(rows, size_bytes, self.now_s)] = rows, size_bytes

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.model)))
        self.admission.leave(ticket)
        del self.model[ticket]

    @invariant()
    def waiting_requests_are_bounded(self) -> None:
        """T5: the waiting requests stay within the limits for any sequence of requests."""
        assert self.admission.rows == sum(rows for rows, _ in self.model.values()) <= LIMITS.rows
        waiting_bytes = sum(size_bytes for _, size_bytes in self.model.values())
        assert self.admission.size_bytes == waiting_bytes <= LIMITS.size_bytes


TestGateway = Gateway.TestCase


def test_a_partition_pauses_when_full_and_resumes_at_half() -> None:
    """T5: rows and bytes count, whichever reaches its limit first."""
    paused: set[int] = set()
    states = []
    for load in (
        PartitionLoad(9, 0),
        PartitionLoad(10, 0),
        PartitionLoad(6, 0),
        PartitionLoad(5, 0),
        PartitionLoad(6, 0),
        PartitionLoad(1, 100),
        PartitionLoad(1, 51),
    ):
        paused = partitions_to_pause({0: load}, paused, rows=10, size_bytes=100)
        states.append(bool(paused))
    assert states == [False, True, True, False, False, True, True]


@given(st.dictionaries(st.integers(0, 3), st.builds(PartitionLoad, st.integers(0, 30), st.integers(0, 300))))
def test_an_empty_partition_is_read_and_a_full_one_is_not(loads: dict[int, PartitionLoad]) -> None:
    """T5: no partition stays paused when it is empty, and partitions are independent."""
    for paused in (set(), set(loads)):
        to_pause = partitions_to_pause(loads, paused, rows=10, size_bytes=100)
        for partition, load in loads.items():
            if load.rows >= 10 or load.size_bytes >= 100:
                assert partition in to_pause
            if load == (0, 0):
                assert partition not in to_pause
