"""Sets when a fetch begins, and how long it waits at the broker.

It waits briefly for some partitions, and longer for all.

The client does not request partitions that are paused, or whose records it has not returned yet. A
broker answers one fetch of a connection after the other, so a fetch that waits for an idle
partition delays the next one for a busy partition. It must be short. A fetch of all partitions ends
with the first record of any, so its wait costs nothing and saves requests. It is long when the
consumer is idle, but it delays the first fetch after a rebalance, and the check of its positions.

Under load fetches keep a gap: the records that come meanwhile share the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

# Seconds that a fetch of some partitions waits. Faust's default is 1.5 s.
BUSY_S = 0.05
# Seconds that a fetch of all partitions waits while records come.
CALM_S = 0.5
# Seconds without records after which a consumer is idle, and how long a fetch waits then; the
# longest first. A member that has lost its coordinator looks for it behind a fetch. The longest
# wait, and a third of a session between two heartbeats, are less than the shortest session (6 s).
RESTS = ((30.0, 2.5), (2.0, 1.0))
# Seconds after which an idle fetcher looks again what to do. Records, seeks, resumed partitions and
# new assignments wake it; a leader that moved does not. The client's 0.2 s cost more than its
# requests.
LOOK_S = 1.0


def no_gap() -> float:
    """Records are urgent."""
    return 0.0


class FetchWait:
    """Sets the wait of each fetch of one of aiokafka's fetchers.

    Args:
        fetcher: the client's.
        clock: monotonic seconds.
        gap_s: seconds from records that were returned to the next fetch, at the load of now.
        rests: see `RESTS`.
    """

    def __init__(
        self,
        fetcher: Any,
        clock: Callable[[], float],
        gap_s: Callable[[], float] = no_gap,
        rests: Sequence[tuple[float, float]] = RESTS,
    ) -> None:
        self._fetcher = fetcher
        self._clock = clock
        self._gap_s = gap_s
        self._rests = rests
        self._plan = fetcher._get_actions_per_node  # noqa: SLF001 (the client has no setting that can change)
        self._assignment: Any = None
        self._busy_s = clock()
        # Partitions whose records are not taken yet, and when the last of them were returned.
        self._held: frozenset[Any] = frozenset()
        self._returned_s = -inf
        fetcher._get_actions_per_node = self._get_actions  # noqa: SLF001 (see `__init__`)
        fetcher._fetcher_timeout = LOOK_S  # noqa: SLF001 (see `__init__`)

    def _get_actions(self, assignment: Any) -> Any:
        """Replaces the client's method, which decides what to fetch next."""
        fetcher, now_s = self._fetcher, self._clock()
        if fetcher._records or assignment is not self._assignment:  # noqa: SLF001 (see `__init__`)
            self._assignment = assignment
            self._busy_s = now_s
        held = frozenset(fetcher._records)  # noqa: SLF001 (see `__init__`)
        if held - self._held:
            self._returned_s = now_s
        self._held = held
        rest_s = next((wait_s for after_s, wait_s in self._rests if now_s - self._busy_s >= after_s), None)
        leaves_out = self._leaves_out(assignment)
        if rest_s is not None and leaves_out:
            rest_s = self._rests[-1][1]
        wait_s = rest_s or (BUSY_S if leaves_out else CALM_S)
        fetcher._fetch_max_wait_ms = int(wait_s * 1000)  # noqa: SLF001 (see `__init__`)
        fetches, resets, timeout_s, invalid_metadata, resumed = self._plan(assignment)
        if (left_s := self._returned_s + self._gap_s() - now_s) > 0:
            fetches, timeout_s = [], min(timeout_s, left_s)
        return fetches, resets, timeout_s, invalid_metadata, resumed

    def _leaves_out(self, assignment: Any) -> bool:
        """Whether the next fetch would not request all partitions."""
        if self._fetcher._records:  # noqa: SLF001 (see `__init__`)
            return True
        states = map(assignment.state_value, assignment.tps)
        return any(state.paused or not state.has_valid_position for state in states)
