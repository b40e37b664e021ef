"""The parts of lists of results."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.flow.result_parts import GROUP_BYTES, GROUP_OBJECTS, PART_ITEMS, groups, parts


@given(st.integers(0, 10 * PART_ITEMS + 1))
def test_parts_have_each_item_once_and_in_order(total):
    """F2: so has the list of results."""
    found = list(parts(total))
    assert [item for part in found for item in part] == list(range(total))
    assert all(0 < len(part) <= PART_ITEMS for part in found)


@given(st.lists(st.sampled_from([0, 0, 1, GROUP_BYTES // 2, GROUP_BYTES, 2 * GROUP_BYTES])))
def test_groups_fit_into_memory(sizes):
    """F2: each result is in one group; only a result that is too large alone exceeds the bound."""
    found = list(groups(sizes))
    assert [index for group in found for index in group] == list(range(len(sizes)))
    for group in found:
        fetched = [sizes[index] for index in group if sizes[index]]
        assert len(fetched) <= GROUP_OBJECTS
        assert len(fetched) <= 1 or sum(fetched) <= GROUP_BYTES
