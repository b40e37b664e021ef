"""How long a gateway keeps unread records of a type that none of its HTTP workers requests.

The gateway leaves the group soon, so that no record stays with a gateway without workers while
another one has idle workers. But each rebalance pauses all members of the group. So the delay
doubles when workers return soon after the gateway has left.
"""

from __future__ import annotations

# The longest delay, as a multiple of the first.
MAX_FACTOR = 8


class IdleBackoff:
    """The delay of one gateway for one type.

    Args:
        first_s: the first delay, in seconds.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._doublings = 0
        self._left_at_s: float | None = None

    @property
    def delay_s(self) -> float:
        """Seconds that unread records wait for a request before the gateway leaves the group."""
        return min(self._first_s * 2.0**self._doublings, self._first_s * MAX_FACTOR)

    def left(self, now_s: float) -> None:
        """Records that the gateway left the group because no worker made a request."""
        self._left_at_s = now_s

    def joining(self, now_s: float) -> None:
        """Records that a worker makes a request, so that the gateway joins the group."""
        if self._left_at_s is None:
            return
        # After a break that is longer than the longest delay, a longer delay would not have avoided
        # the rebalance.
        soon = now_s - self._left_at_s < self._first_s * MAX_FACTOR
        self._doublings = min(self._doublings + 1, MAX_FACTOR) if soon else 0
        self._left_at_s = None
