"""Ends of tasks by minute."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.recent_ends import MINUTES, PART_S, SETTLED_S, Ends, RecentEnds

NOW_S = 1_764_000_000.0


def everything(_type: str) -> bool:
    return True


def test_each_minute_has_its_ends_by_outcome():
    ends = RecentEnds()
    minute = int(NOW_S // 60)
    part = minute * 60 // PART_S
    ends.put(
        [
            Ends("a", "succeeded", part, 3),
            Ends("a", "quarantined", part, 1),
            Ends("b", "cancelled", part - 6, 2),
        ],
        NOW_S + 1,
        NOW_S,
    )
    found = ends.minutes(NOW_S, everything)
    assert len(found) == MINUTES
    assert found[-1] == (minute * 60, Counter(succeeded=3, failed=1))
    assert found[-2] == (minute * 60 - 60, Counter(cancelled=2))
    assert ends.minutes(NOW_S, lambda name: name == "b")[-1][1] == Counter()


@given(
    st.lists(st.tuples(st.integers(0, 1200), st.integers(0, SETTLED_S - 1)), max_size=60),
    st.lists(st.integers(1, 90), max_size=40),
)
def test_no_end_is_lost_or_counted_twice(happened, pauses):
    """However often the ends are read, and however late they commit within the time allowed."""
    ends, now_s = RecentEnds(), NOW_S
    for pause in (1, *pauses):
        now_s += pause
        visible = [NOW_S + at for at, late in happened if NOW_S + at + late <= now_s]
        since = ends.wanted_s(now_s)
        counted = Counter(int(at // PART_S) for at in visible if since <= at)
        ends.put([Ends("a", "succeeded", part, tasks) for part, tasks in counted.items()], now_s + 1, now_s)
        found = ends.minutes(now_s, everything)
        first = found[0][0]
        assert sum(counts["succeeded"] for _, counts in found) == sum(first <= at for at in visible)
