"""How long a fetch waits at the broker: briefly while it asks for some partitions only, longer when it asks for all.

The client leaves partitions out of which it has records that are not yet taken, or which are paused. A broker answers one
fetch after the other, so what waits for an idle partition then keeps the client from asking for a busy one: such a fetch must
not wait long. One that asks for all of them is ended at once by the first record of any, so its wait costs nothing and
spares both sides a lot of asking; but it also stands in the way of the next assignment's, so it is long only at rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# Seconds a fetch of some partitions waits. Faust lets it wait 1.5 s.
BUSY_S = 0.05
# And one of all partitions, while records come.
CALM_S = 0.5
# Seconds without records after which there is rest, and how long a fetch waits then, the longest rest first: after a
# rebalance the fetch of another assignment may still be waiting.
RESTS = ((30.0, 2.5), (2.0, 1.0))
# Of a worker's and of other clients': a task must not wait longer because the worker that is given it had nothing to do.
SHORT_RESTS = RESTS[1:]
# What a lingering fetch need not wait for any longer.
LINGER_BYTES = 64 * 1024


class Fetching:
    """Sets the wait of each fetch of one of aiokafka's fetchers.

    Args:
        fetcher: the client's.
        clock: seconds that only grow.
        linger_s: how long the broker may wait for more records, under load, before it hands over the first.
        rests: see `RESTS`.
    """

    def __init__(
        self,
        fetcher: Any,
        clock: Callable[[], float],
        linger_s: float = 0.0,
        rests: Sequence[tuple[float, float]] = RESTS,
    ) -> None:
        self._fetcher = fetcher
        self._clock = clock
        self._linger_s = linger_s
        self._rests = rests
        self._plan = fetcher._get_actions_per_node  # noqa: SLF001 (the client has no setting that can change)
        self._assignment: Any = None
        self._busy_s = clock()
        fetcher._get_actions_per_node = self._get_actions  # noqa: SLF001 (see `__init__`)

    def _get_actions(self, assignment: Any) -> Any:
        """Instead of the client's own, which decides what to fetch next."""
        fetcher, now_s = self._fetcher, self._clock()
        if fetcher._records or assignment is not self._assignment:  # noqa: SLF001 (see `__init__`)
            self._assignment = assignment
            self._busy_s = now_s
        rest_s = next((wait_s for after_s, wait_s in self._rests if now_s - self._busy_s >= after_s), None)
        wait_s = rest_s or self._linger_s or (BUSY_S if self._leaves_out(assignment) else CALM_S)
        fetcher._fetch_max_wait_ms = int(wait_s * 1000)  # noqa: SLF001 (see `__init__`)
        fetcher._fetch_min_bytes = LINGER_BYTES if self._linger_s and rest_s is None else 1  # noqa: SLF001 (see `__init__`)
        return self._plan(assignment)

    def _leaves_out(self, assignment: Any) -> bool:
        """Whether a fetch planned now would not ask for all partitions."""
        if self._fetcher._records:  # noqa: SLF001 (see `__init__`)
            return True
        states = map(assignment.state_value, assignment.tps)
        return any(state.paused or not state.has_valid_position for state in states)
