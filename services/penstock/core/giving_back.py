"""How long a gateway keeps records that none of its workers asks for, while others could take them.

Soon, so that no record waits with a gateway that has no worker while another has idle ones. But each time partitions change
hands all members of the group pause for a moment, so one whose workers come back soon after it gave back keeps them longer
the next time.
"""

from __future__ import annotations

# The longest patience, as a multiple of the first.
MOST = 8


class Patience:
    """Of one gateway with one type.

    Args:
        first_s: seconds, at first, that unread records wait for a request before they are given back.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._doublings = 0
        self._gave_back_s: float | None = None

    @property
    def seconds(self) -> float:
        """How long unread records wait for a request now."""
        return min(self._first_s * 2.0**self._doublings, self._first_s * MOST)

    def give_back(self, now_s: float) -> None:
        """Partitions were given back because nobody asked."""
        self._gave_back_s = now_s

    def ask(self, now_s: float) -> None:
        """Somebody asks, and the group is joined."""
        if self._gave_back_s is None:
            return
        # Longer away than the longest patience: keeping them would not have helped.
        soon = now_s - self._gave_back_s < self._first_s * MOST
        self._doublings = min(self._doublings + 1, MOST) if soon else 0
        self._gave_back_s = None
