"""Selects tasks among the concurrency keys of one effective level, one page of keys a statement.

Without ageing the effective level of a task is its level, and one level is read. With ageing the
queue of a key has the first tasks of several levels, which have waited long enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.contracts.task_type import TaskType
from penstock.core.fair_queueing import Cursor, KeyQueue, select_in_order, select_round_robin, successor
from penstock.core.release_order import waits_s
from penstock.core.task import Priority
from penstock.postgres import limits
from penstock.postgres.session import Session

# Most concurrency keys that one statement reads.
KEYS_PER_PAGE = 256


@dataclass(slots=True)
class KeySelection:
    """The tasks that one release of a type selects, over all levels.

    Attributes:
        session: the owner of the type.
        task_type: the type; its tasks are tracked.
        limit: most tasks.
        pages: pages of keys that it may still read beyond the first of each level.
        excluded: tasks that are left out.
        oldest_s: how long the first task of each level has waited; needed for ageing only.
        levels: the selected tasks by id, in order, with their effective levels.
        by_key: how many it has selected of each key.
    """

    session: Session
    task_type: TaskType
    limit: int
    pages: int
    excluded: Sequence[int] = ()
    oldest_s: dict[int, float] = field(default_factory=dict)
    levels: dict[int, int] = field(default_factory=dict)
    by_key: dict[str, int] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """How many more tasks it may select."""
        return self.limit - len(self.levels)

    async def page(self, level: Priority, first: str, end: str | None = None) -> list[KeyQueue]:
        """The next keys with tasks that may have an effective level, with the room left to them."""
        ageing_s = self.task_type.ageing_s
        # Tasks that are selected have waited long enough for the levels below, too.
        excluded = self.excluded if ageing_s is None else [*self.excluded, *self.levels]
        waits = waits_s(level, self.oldest_s, ageing_s)
        size = limits.PageSize(waits, self.left, KEYS_PER_PAGE, excluded)
        return await limits.key_queues(self.session, self.task_type, size, first, end)

    def add(self, ids: Sequence[int], level: Priority, page: Sequence[KeyQueue]) -> None:
        """Adds tasks of a page."""
        self.levels.update(dict.fromkeys(ids, int(level)))
        added = set(ids)
        for queue in page if added else ():
            key = queue.concurrency_key
            self.by_key[key] = self.by_key.get(key, 0) + len(added.intersection(queue.ids))

    def less_selected(self, queue: KeyQueue) -> KeyQueue:
        """The queue with its room reduced by the tasks of its key that are selected already."""
        selected = self.by_key.get(queue.concurrency_key, 0)
        return replace(queue, room=queue.room - selected) if selected else queue


class Round(NamedTuple):
    """The place where a round of several pages continues in a later release.

    Attributes:
        level: the effective level.
        start: the key with which the round began; it ends before this key.
        first: the next key.
        wrapped: it has reached the last key, and goes on from the first one.
        selected: it has selected tasks.
    """

    level: Priority
    start: str
    first: str
    wrapped: bool
    selected: bool


class KeyScan:
    """One release of one level: goes round its keys from the cursor on.

    Args:
        selected: what the release has selected at levels above; updated.
        level: the effective level.
        cursor: where the release before stopped.

    Attributes:
        cursor: where the next release starts.
        round: where the next release continues, if the budget ended this one.
        full: a key with ready tasks has no room, or is paused.
    """

    def __init__(self, selected: KeySelection, level: Priority, cursor: Cursor) -> None:
        self._selected = selected
        self._level = level
        self.cursor = cursor
        self.round: Round | None = None
        self.full = False

    async def select(self, continued: Round | None = None) -> bool:
        """Selects tasks; True when further tasks may be released at once.

        Args:
            continued: the round of an earlier release that this one continues.
        """
        if continued is not None:
            end = continued.start if continued.wrapped else None
            page = await self._page(continued.first, end)
            return await self._select_pages(page, None, continued)
        start = self.cursor.first
        begun = Round(self._level, start, start, wrapped=False, selected=False)
        page = await self._page(start)
        if len(page) == KEYS_PER_PAGE:
            return await self._select_pages(page, None, begun)
        rest = await self._page("", start) if start else []
        if len(rest) == KEYS_PER_PAGE:
            return await self._select_pages(page, rest, begun)
        return self._select([*page, *rest], one_round=False)

    async def _select_pages(self, page: list[KeyQueue], rest: list[KeyQueue] | None, current: Round) -> bool:
        """One round over several pages of keys; `rest` is the page from "" on, if it was read."""
        before = self._selected.left
        while True:
            if self._select(page, one_round=True) or self._selected.left <= 0:
                return True
            current = current._replace(selected=current.selected or self._selected.left < before)
            if len(page) == KEYS_PER_PAGE:
                current = current._replace(first=successor(page[-1].concurrency_key))
            elif not current.wrapped and current.start:
                current = current._replace(first="", wrapped=True)
            else:
                return current.selected
            if not current.first and rest is not None:
                page = rest
                continue
            if self._selected.pages <= 0:
                self.round = current
                return True
            self._selected.pages -= 1
            page = await self._page(current.first, current.start if current.wrapped else None)

    async def _page(self, first: str, end: str | None = None) -> list[KeyQueue]:
        return await self._selected.page(self._level, first, end)

    def _select(self, page: Sequence[KeyQueue], *, one_round: bool) -> bool:
        queues = [self._selected.less_selected(queue) for queue in page]
        if self._selected.task_type.fair:
            selection = select_round_robin(queues, self._selected.left, self.cursor, one_round=one_round)
        else:
            cursor = Cursor(page[-1].concurrency_key) if one_round and page else self.cursor
            selection = select_in_order(queues, self._selected.left, cursor)
        self.cursor = selection.cursor
        self.full = self.full or any(queue.room <= 0 for queue in queues)
        self._selected.add(selection.ids, self._level, page)
        return selection.truncated
