"""The choice of polls that are claimed first, and the number of attempts that a worker holds."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.early_start import (
    EARLY_START,
    HORIZON_S,
    BacklogLimit,
)

SETTLED_S = EARLY_START.after_assignment_s + 1


def test_a_few_new_records_run_first():
    """W3: only a few new records without a suspect, on a worker whose partitions have not moved
    lately, run before they are claimed."""

    def claims_first(records=1, oldest_s=0.0, assigned_s=SETTLED_S, *, suspects=False):
        return EARLY_START.claims_first(
            records=records, oldest_s=oldest_s, assigned_s=assigned_s, suspects=suspects
        )

    assert not claims_first(EARLY_START.many_records - 1)
    assert claims_first(EARLY_START.many_records)
    assert claims_first(oldest_s=EARLY_START.old_s)
    assert claims_first(assigned_s=EARLY_START.after_assignment_s - 0.1)
    assert claims_first(suspects=True)


ENDS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 500)), max_size=30)


@given(st.integers(0, 1_000), ENDS)
def test_the_backlog_is_what_ended_lately(most, ends):
    """W2: a worker holds as many attempts beyond its slots as ended within the last quarter of a
    second, and at most its backlog."""
    limit, now_s = BacklogLimit(most), 0.0
    ended = []
    for pause_s, count in ends:
        now_s += pause_s
        limit.add_ended(count, now_s)
        ended.append((now_s, count))
        lately = sum(count for at_s, count in ended if at_s + HORIZON_S > now_s)
        assert limit.at(now_s) == min(most, lately)
