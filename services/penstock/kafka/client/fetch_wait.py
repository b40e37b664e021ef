"""Sets how long a fetch waits at the broker: briefly for some partitions, longer for all.

The client does not request partitions that are paused, or whose records it has not returned yet. A
broker answers one fetch of a connection after the other, so a fetch that waits for an idle
partition delays the next one for a busy partition. It must be short. A fetch of all partitions ends
with the first record of any, so its wait costs nothing and saves requests. It is long when the
consumer is idle. When a rebalance revokes the partitions of such a fetch, its connection is closed:
otherwise the first fetch of the new assignment, and the check of its positions, would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiokafka.client import ConnectionGroup
from aiokafka.conn import CloseReason

# Seconds that a fetch of some partitions waits. Faust's default is 1.5 s.
BUSY_S = 0.05
# Seconds that a fetch of all partitions waits while records come.
CALM_S = 0.5
# Seconds without records after which a consumer is idle, and how long a fetch waits then; the
# longest first. A member that has lost its coordinator looks for it behind a fetch. The longest
# wait, and a third of a session between two heartbeats, are less than the shortest session (6 s).
RESTS = ((30.0, 3.5), (2.0, 1.0))
# Seconds after which an idle fetcher looks again what to do; everything that matters wakes it. The
# client's 0.2 s cost more than its requests.
LOOK_S = 1.0
# Bytes at which a lingering fetch ends.
LINGER_BYTES = 64 * 1024


class FetchWait:
    """Sets the wait of each fetch of one of aiokafka's fetchers.

    Args:
        fetcher: the client's.
        clock: monotonic seconds.
        linger_s: how long the broker may wait for more records, under load, before it returns the
            first.
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
        self._send = fetcher._proc_fetch_request  # noqa: SLF001 (see `__init__`)
        fetcher._proc_fetch_request = self._fetch  # noqa: SLF001 (see `__init__`)
        fetcher._fetcher_timeout = LOOK_S  # noqa: SLF001 (see `__init__`)

    def _get_actions(self, assignment: Any) -> Any:
        """Replaces the client's method, which decides what to fetch next."""
        fetcher, now_s = self._fetcher, self._clock()
        if fetcher._records or assignment is not self._assignment:  # noqa: SLF001 (see `__init__`)
            self._assignment = assignment
            self._busy_s = now_s
        rest_s = next((wait_s for after_s, wait_s in self._rests if now_s - self._busy_s >= after_s), None)
        leaves_out = self._leaves_out(assignment)
        if rest_s is not None and leaves_out:
            rest_s = self._rests[-1][1]
        wait_s = rest_s or self._linger_s or (BUSY_S if leaves_out else CALM_S)
        fetcher._fetch_max_wait_ms = int(wait_s * 1000)  # noqa: SLF001 (see `__init__`)
        fetcher._fetch_min_bytes = LINGER_BYTES if self._linger_s and rest_s is None else 1  # noqa: SLF001 (see `__init__`)
        return self._plan(assignment)

    async def _fetch(self, assignment: Any, node: int, request: Any) -> bool:
        """Replaces the client's method, which sends a fetch and returns whether it has records.

        Closes the connection of a long fetch whose partitions were revoked.
        """
        try:
            return bool(await self._send(assignment, node, request))
        finally:
            if not assignment.active and request._max_wait_ms > CALM_S * 1000:  # noqa: SLF001 (see `__init__`)
                connection = self._fetcher._client._conns.get((node, ConnectionGroup.DEFAULT))  # noqa: SLF001 (see `__init__`)
                if connection is not None and connection._requests:  # noqa: SLF001 (see `__init__`)
                    # As if it had broken: the client requests metadata again that wait behind it.
                    connection.close(reason=CloseReason.CONNECTION_BROKEN)

    def _leaves_out(self, assignment: Any) -> bool:
        """Whether the next fetch would not request all partitions."""
        if self._fetcher._records:  # noqa: SLF001 (see `__init__`)
            return True
        states = map(assignment.state_value, assignment.tps)
        return any(state.paused or not state.has_valid_position for state in states)
