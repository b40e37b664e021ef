"""The work of the owned shards: which have messages, and when the next limit is due."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from penstock.postgres import flows
from penstock.postgres.session import Session


class ShardWork:
    """The shards that this replica owns, and their work.

    Args:
        session: the owner of the shards.

    Attributes:
        owned: the shards.
        due_at_s: when the next limit of a flow is due, on the loop's clock.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # Shards with messages, in the order of their turns.
        self._dirty: dict[int, None] = {}
        self.owned: set[int] = set()
        self.due_at_s = inf

    @property
    def due(self) -> bool:
        """Whether a limit is due."""
        return asyncio.get_running_loop().time() >= self.due_at_s

    def __bool__(self) -> bool:
        """Whether there is work now."""
        return bool(self._dirty) or self.due

    def mark(self, shards: Iterable[int]) -> None:
        """Notes that shards have messages; those of other replicas are left out later."""
        self._dirty.update(dict.fromkeys(shards))

    def mark_due(self) -> None:
        """Notes that a limit may be due."""
        self.due_at_s = asyncio.get_running_loop().time()

    def note_limit(self, due_s: float | None) -> None:
        """Notes a limit that is due in so many seconds; None for no limit."""
        if due_s is not None:
            at_s = asyncio.get_running_loop().time() + max(0.0, due_s)
            self.due_at_s = min(self.due_at_s, at_s)

    async def find(self, shards: Iterable[int]) -> None:
        """Reads which of these shards have messages, and the next limit of all."""
        self.mark(await flows.shards_with_inbox(self._session, shards))
        due_s = await flows.next_due_s(self._session, self.owned)
        self.due_at_s = inf
        self.note_limit(due_s)

    async def find_limit(self) -> None:
        """Reads the next limit of all owned shards."""
        self.note_limit(await flows.next_due_s(self._session, self.owned))

    def take(self) -> tuple[list[int], bool]:
        """Takes shards with messages in the order of their turns, and whether a limit is due."""
        owned = [shard for shard in self._dirty if shard in self.owned]
        self._dirty = {}
        is_due = self.due
        if is_due:
            # Until the next limit is known.
            self.due_at_s = inf
        return owned, is_due

    def note_rest(self, shards: Sequence[int], taken: Counter[int], each: int, most: int) -> None:
        """Notes shards that may have more messages, after a transaction that took some of them.

        Args:
            shards: in the order of their turns. Those that the transaction did not reach stay the
                next ones, or others that are notified meanwhile would have all turns.
            taken: rows that it took, by shard.
            each: most rows of a shard.
            most: most rows of all.
        """
        if taken.total() >= most:
            last = max(map(shards.index, taken))
            self._dirty = dict.fromkeys([*shards[last + 1 :], *self._dirty])
            self.mark([shards[last]])
        self.mark(shard for shard, rows in taken.items() if rows >= each)

    def put_back(self, shards: Iterable[int], *, is_due: bool) -> None:
        """Notes what `take` returned, after a transaction without effect."""
        self.mark(shards)
        if is_due:
            self.mark_due()
