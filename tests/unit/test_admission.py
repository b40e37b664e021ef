"""Who is let in while PostgreSQL is behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.admission import LONGEST_S, SHORTEST_S, Admission, Limits, Load, Why, crowded

LIMITS = Limits(rows=100, size_bytes=10_000, wait_s=5.0)


def test_nothing_is_refused_while_nothing_waits() -> None:
    """T5: one request always goes, however large: its own limits are others' to keep."""
    assert Admission(LIMITS).refusal(1_000_000, 1_000_000, 0.0) is None


def test_each_limit_refuses_and_says_so() -> None:
    """T5: rows and bytes bound what is held; waiting bounds how late it may be."""
    admission = Admission(LIMITS)
    ticket = admission.enter(60, 6_000, 0.0)
    assert admission.refusal(40, 4_000, 0.0) is None
    for rows, size_bytes, now_s, why in (
        (41, 0, 0.0, Why.ROWS),
        (0, 4_001, 0.0, Why.BYTES),
        (1, 1, 5.1, Why.LATE),
    ):
        refusal = admission.refusal(rows, size_bytes, now_s)
        assert refusal is not None
        assert refusal.why is why
    admission.leave(ticket)
    assert admission.refusal(41, 4_001, 100.0) is None


def test_retry_after_grows_with_the_wait() -> None:
    """T5: a database that has stood still for long is not asked every second by everybody."""
    admission = Admission(LIMITS)
    admission.enter(100, 0, 0.0)
    found = []
    for now_s in (0.0, 3.0, 12.0, 1_000.0):
        refusal = admission.refusal(1, 1, now_s)
        assert refusal is not None
        found.append(refusal.retry_after_s)
    assert found == [SHORTEST_S, 3.0, 12.0, LONGEST_S]


def test_the_oldest_that_is_left_counts() -> None:
    """T5: what goes ahead of an older one does not hide it, and once that has gone nobody is late."""
    admission = Admission(LIMITS)
    first = admission.enter(1, 1, 0.0)
    second = admission.enter(1, 1, 4.0)
    admission.enter(1, 1, 6.0)
    admission.leave(second)
    assert admission.oldest_s(7.0) == 7.0
    admission.leave(first)
    assert admission.oldest_s(7.0) == 1.0


class Gateway(RuleBasedStateMachine):
    """Requests come, wait and are answered in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(LIMITS)
        self.model: dict[int, tuple[int, int]] = {}
        self.now_s = 0.0

    @rule(rows=st.integers(1, 60), size_bytes=st.integers(1, 6_000), passed_s=st.floats(0, 3))
    def ask(self, rows: int, size_bytes: int, passed_s: float) -> None:
        self.now_s += passed_s
        if self.admission.refusal(rows, size_bytes, self.now_s) is None:
            self.model[self.admission.enter(rows, size_bytes, self.now_s)] = rows, size_bytes

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.model)))
        self.admission.leave(ticket)
        del self.model[ticket]

    @invariant()
    def what_waits_is_bounded(self) -> None:
        """T5: whatever comes, no more waits than may."""
        assert self.admission.rows == sum(rows for rows, _ in self.model.values()) <= LIMITS.rows
        held_bytes = sum(size_bytes for _, size_bytes in self.model.values())
        assert self.admission.size_bytes == held_bytes <= LIMITS.size_bytes


TestGateway = Gateway.TestCase


def test_a_partition_is_paused_when_full_and_read_on_when_half_is_left() -> None:
    """T5: by rows or by bytes, whichever comes first."""
    paused: set[int] = set()
    seen = []
    for load in (Load(9, 0), Load(10, 0), Load(6, 0), Load(5, 0), Load(6, 0), Load(1, 100), Load(1, 51)):
        paused = crowded({0: load}, paused, rows=10, size_bytes=100)
        seen.append(bool(paused))
    assert seen == [False, True, True, False, False, True, True]


@given(st.dictionaries(st.integers(0, 3), st.builds(Load, st.integers(0, 30), st.integers(0, 300))))
def test_a_partition_with_nothing_in_hand_is_read_and_a_full_one_is_not(in_hand: dict[int, Load]) -> None:
    """T5: no partition is forgotten paused, and each is judged by itself."""
    for paused in (set(), set(in_hand)):
        found = crowded(in_hand, paused, rows=10, size_bytes=100)
        for number, load in in_hand.items():
            if load.rows >= 10 or load.size_bytes >= 100:
                assert number in found
            if load == (0, 0):
                assert number not in found
