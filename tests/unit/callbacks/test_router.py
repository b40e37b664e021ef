"""The slots of slow calls."""

from penstock.callbacks.router import SlowPool


def test_the_slow_pool_is_bounded_in_total_and_per_target():
    """C7a: a call that finds no room keeps its slot in the lane."""
    pool = SlowPool(3, 2)
    assert [pool.enter(target) for target in "aaabb"] == [True, True, False, True, False]
    pool.leave("a")
    assert pool.enter("b")
    assert len(pool) == 3
