"""How many rows the owner's next transaction takes, and how many decisions it makes."""

from __future__ import annotations

# Seconds that a transaction should take: others wait for the flows that it locks, and the ends of
# tasks wait for the next one.
TRANSACTION_S = 0.07
MIN_ROWS = 100
FIRST_ROWS = 500
# Each shard in a transaction gets at least so many rows of its inbox.
ROWS_PER_SHARD = 32


class TransactionSize:
    """The size of the next transaction, which follows from the time of the last.

    Args:
        max_rows: its upper bound.

    Attributes:
        rows: that it takes, and decisions that it makes.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.rows = min(FIRST_ROWS, max_rows)

    @property
    def shards(self) -> int:
        """So many shards that each gets its rows."""
        return max(1, self.rows // ROWS_PER_SHARD)

    def rows_of_each(self, shards: int) -> int:
        """The rows of each of these shards."""
        return max(ROWS_PER_SHARD, self.rows // max(1, shards))

    def adapt(self, work: int, took_s: float) -> None:
        """Follows a transaction of so many rows or decisions; small ones tell nothing."""
        if work > MIN_ROWS // 2:
            rows = int(self.rows * min(2.0, TRANSACTION_S / took_s))
            self.rows = max(MIN_ROWS, min(rows, self._max_rows))
