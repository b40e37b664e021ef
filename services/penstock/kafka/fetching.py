"""How long a fetch waits at the broker: briefly while records come, long once none have come for a while.

The client asks for partitions apart when it has records of others that are not yet taken: what waits for an idle partition
then keeps it from asking for a busy one, so under load a fetch must not wait long. At rest there is one fetch for all of them,
which the first record of any ends at once, so the wait costs nothing there and spares broker and processor a lot of asking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Seconds a fetch waits while records come. Faust lets it wait 1.5 s.
BUSY_S = 0.05
# Seconds without records after which there is rest, and how long a fetch waits then, the longest rest first: after a
# rebalance the fetch of another assignment may still be waiting.
RESTS = ((30.0, 2.5), (2.0, 1.0))
# What a lingering fetch need not wait for any longer.
LINGER_BYTES = 64 * 1024


class Fetching:
    """Sets the wait of each fetch of one of aiokafka's fetchers.

    Args:
        fetcher: the client's.
        clock: seconds that only grow.
        linger_s: how long the broker may wait for more records, under load, before it hands over the first.
    """

    def __init__(self, fetcher: Any, clock: Callable[[], float], linger_s: float) -> None:
        self._fetcher = fetcher
        self._clock = clock
        self._linger_s = linger_s
        self._plan = fetcher._get_actions_per_node  # noqa: SLF001 (the client has no setting that can change)
        self._assignment: Any = None
        self._busy_s = clock()
        fetcher._get_actions_per_node = self._get_actions  # noqa: SLF001 (as above)

    def _get_actions(self, assignment: Any) -> Any:
        """Instead of the client's own, which decides what to fetch next."""
        fetcher, now_s = self._fetcher, self._clock()
        if fetcher._records or assignment is not self._assignment:  # noqa: SLF001 (as above)
            self._assignment = assignment
            self._busy_s = now_s
        rest_s = next((wait_s for after_s, wait_s in RESTS if now_s - self._busy_s >= after_s), None)
        wait_s = rest_s or self._linger_s or BUSY_S
        fetcher._fetch_max_wait_ms = int(wait_s * 1000)  # noqa: SLF001 (as above)
        fetcher._fetch_min_bytes = LINGER_BYTES if self._linger_s and rest_s is None else 1  # noqa: SLF001 (as above)
        return self._plan(assignment)
