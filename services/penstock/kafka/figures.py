"""What a processor counts of itself."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.acknowledgement import Hand


class ProcessorFigures:
    """Plain numbers, read whenever somebody asks.

    Attributes:
        rejected: records, or parts of them, that were parked, by topic.
        lag: records not taken yet when it last looked, by topic.
        waits: how often a server that is away was waited for.
        generations: of its group, in which it has been.

    Args:
        hand: what is in hand.
        topics: that it reads (bare names).
    """

    def __init__(self, hand: Hand, topics: Iterable[str]) -> None:
        self._hand = hand
        self.rejected = dict.fromkeys(topics, 0)
        self.lag = dict.fromkeys(self.rejected, 0)
        self.waits = 0
        self.generations = 0

    @property
    def in_hand(self) -> int:
        """Records taken and not settled."""
        return len(self._hand)
