"""How many rows the owner's next transaction takes, and how many decisions it makes."""

from __future__ import annotations

# Seconds that a transaction should take: others wait for the flows that it locks, and the ends of
# tasks wait for the next one.
TRANSACTION_S = 0.07
MIN_ROWS = 100
FIRST_ROWS = 500
# Each shard whose turn it is gets at least so many rows of its inbox. Fewer would slow a family
# with many rows; more would leave the turns to fewer shards.
ROWS_PER_SHARD = 32
# Decisions for each row. The end of a task in a nested flow starts a child, which begins in the
# same transaction; without room for that its beginning would be a row of the next transaction.
DECISIONS_PER_ROW = 2


class TransactionSize:
    """The size of the next transaction, which follows from the time of the last.

    Args:
        max_rows: its upper bound.

    Attributes:
        rows: that it takes.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self.rows = min(FIRST_ROWS, max_rows)

    @property
    def decisions(self) -> int:
        """Decisions after which it ends."""
        return self.rows * DECISIONS_PER_ROW

    def rows_of_each(self, shards: int) -> int:
        """The most rows of one of these shards; all together get `rows`."""
        return max(ROWS_PER_SHARD, self.rows // max(1, shards))

    def adapt(self, work: int, took_s: float) -> None:
        """Follows a transaction of so many rows or decisions; small ones tell nothing."""
        if work > MIN_ROWS // 2:
            rows = int(self.rows * min(2.0, TRANSACTION_S / took_s))
            self.rows = max(MIN_ROWS, min(rows, self._max_rows))
