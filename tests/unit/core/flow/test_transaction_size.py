"""The size of the owner's transactions."""

from __future__ import annotations

from penstock.core.flow.transaction_size import FIRST_ROWS, MIN_ROWS, TRANSACTION_S, TransactionSize


def test_a_transaction_follows_the_time_of_the_last() -> None:
    """F6: a slow transaction makes the next one smaller, and a fast one at most doubles it, within
    bounds. A small one changes nothing, because its time is mostly fixed costs."""
    size = TransactionSize(max_rows=1_500)
    assert size.rows == FIRST_ROWS
    size.adapt(1, took_s=10.0)
    assert size.rows == FIRST_ROWS
    size.adapt(FIRST_ROWS, took_s=TRANSACTION_S / 10)
    assert size.rows == 2 * FIRST_ROWS
    size.adapt(FIRST_ROWS, took_s=TRANSACTION_S / 10)
    assert size.rows == 1_500
    size.adapt(FIRST_ROWS, took_s=10.0)
    assert size.rows == MIN_ROWS


def test_each_shard_gets_its_rows() -> None:
    """F6: beside many shards a shard gets more than a few rows, and alone it gets all."""
    size = TransactionSize(max_rows=MIN_ROWS)
    assert size.rows_of_each(64) == 32
    assert size.rows_of_each(1) == size.rows
    assert size.decisions > size.rows
