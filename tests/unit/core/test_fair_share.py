"""However many tenants fill a pool, the next one finds a place."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.fair_share import most_used


@given(slots=st.integers(1, 600), asking=st.lists(st.integers(0, 4), max_size=2000))
def test_some_of_the_pool_stays_free(slots: int, asking: list[int]) -> None:
    """Up to five tenants ask in any order; each may take a place if it uses fewer than its
    most."""
    used: Counter[int] = Counter()
    for tenant in asking:
        free = slots - used.total()
        if free and used[tenant] < most_used(free):
            used[tenant] += 1
    free = slots - used.total()
    assert free >= (slots >= 2 * (len(used) + 1))
    assert max(used.values(), default=0) <= max(1, 7 * slots // 8)


def test_a_tenant_alone_uses_almost_all() -> None:
    used = 0
    while used < most_used(500 - used):
        used += 1
    assert used == 437
