"""Which migrations are due in which step of an upgrade."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.migrating import Step, due, expected
from penstock.errors import CannotStart

NAMES = ["0001_a", "0002_b", "0003_c.post", "0004_d", "0005_e.post"]


def test_each_step_takes_its_own():
    """O9: what adds comes before new services, what takes away after old ones; both together in order."""
    assert due(NAMES, NAMES[:3], Step.PRE) == ["0004_d"]
    assert due(NAMES, NAMES[:4], Step.POST) == ["0005_e.post"]
    assert due(NAMES, NAMES, Step.PRE) == due(NAMES, NAMES, Step.POST) == due(NAMES, NAMES, None) == []
    assert due(NAMES, [], None) == NAMES


def test_a_new_database_takes_all_at_once():
    """O9: a first installation by the first step alone, as the chart and compose have it, is complete and refuses nothing."""
    assert due(NAMES, [], Step.PRE) == NAMES


def test_no_step_is_taken_before_the_one_ahead_of_it():
    """O9: who skips a release would take away what the services still running need."""
    with pytest.raises(CannotStart, match=r"0003_c\.post takes away"):
        due(NAMES, NAMES[:2], Step.PRE)
    with pytest.raises(CannotStart, match="0004_d has not been applied"):
        due(NAMES, NAMES[:3], Step.POST)


def test_services_need_only_what_is_added():
    """A service starts between the two steps."""
    assert expected(NAMES) == ["0001_a", "0002_b", "0004_d"]


@given(st.lists(st.booleans(), max_size=8), st.integers(0, 8))
def test_steps_by_turns_end_where_both_at_once_end(posts, done):
    """O9: from wherever a database is, first `pre` and then `post` leave nothing, or say what comes first."""
    names = [f"{n:04}_x{'.post' if post else ''}" for n, post in enumerate(posts)]
    applied = names[:done]
    try:
        for step in (Step.PRE, Step.POST):
            found = due(names, applied, step)
            assert found == [name for name in names if name in found]
            applied = applied + found
    except CannotStart:
        assert any(name.endswith(".post") for name in names[done:])
    else:
        assert sorted(applied) == names
        assert applied[done:] == names[done:]
