"""The turns of the shards of flows in the owner's transactions."""

from __future__ import annotations

from collections import Counter
from unittest.mock import Mock

from penstock.flow_owner.shard_work import ShardWork


async def test_busy_shards_leave_no_other_without_a_turn() -> None:
    """F6: a transaction is full before the last shard's turn, while a busy shard gets more rows."""
    work = ShardWork(Mock())
    work.owned.update(range(64))
    work.mark([3, 1, 2, 64])
    shards, _ = work.take()
    assert shards == [3, 1, 2]
    work.mark([3])
    work.note_rest(shards, Counter({3: 32, 1: 18}), each=32, most=50)
    assert work.take()[0] == [2, 3, 1]
    work.note_rest([2, 3, 1], Counter({2: 5, 3: 7, 1: 1}), each=32, most=50)
    assert not work
