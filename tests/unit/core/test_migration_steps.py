"""The steps of an upgrade and their migrations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.migration_steps import Step, due, expected
from penstock.errors import CannotStart

NAMES = ["0001_a", "0002_b", "0003_c.post", "0004_d", "0005_e.post"]


def test_each_step_has_its_migrations():
    """O9: additions run before new services start, removals after old ones end; both keep the
    order."""
    assert due(NAMES, NAMES[:3], Step.PRE) == ["0004_d"]
    assert due(NAMES, NAMES[:4], Step.POST) == ["0005_e.post"]
    assert due(NAMES, NAMES, Step.PRE) == due(NAMES, NAMES, Step.POST) == due(NAMES, NAMES, None) == []
    assert due(NAMES, [], None) == NAMES


def test_a_new_database_gets_all_migrations_at_once():
    """O9: a first installation runs step `pre` only, as chart and compose do, and is complete."""
    assert due(NAMES, [], Step.PRE) == NAMES


def test_steps_run_in_order():
    """O9: skipping a release would remove objects that running services need."""
    with pytest.raises(CannotStart, match=r"0003_c\.post removes objects"):
        due(NAMES, NAMES[:2], Step.PRE)
    with pytest.raises(CannotStart, match="0004_d has not been applied"):
        due(NAMES, NAMES[:3], Step.POST)


def test_services_require_only_additions():
    """Services start between the two steps."""
    assert expected(NAMES) == ["0001_a", "0002_b", "0004_d"]


@given(st.lists(st.booleans(), max_size=8), st.integers(0, 8))
def test_alternating_steps_end_like_both_at_once(posts, done):
    """O9: from any state, `pre` and then `post` apply all migrations, or name the step that must
    come first."""
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
