"""Selects tasks among the concurrency keys of one level, one page of keys a statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.contracts.task_type import TaskType
from penstock.core.fair_queueing import Cursor, KeyQueue, select_in_order, select_round_robin, successor
from penstock.core.task import Priority
from penstock.postgres import limits
from penstock.postgres.session import Session

# Most concurrency keys that one statement reads.
KEYS_PER_PAGE = 256


@dataclass(slots=True)
class PageBudget:
    """The pages of keys that one release may read beyond the first of each level."""

    left: int


class Round(NamedTuple):
    """The place where a round of several pages continues in a later release.

    Attributes:
        level: the priority.
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
        session: the owner of the type.
        task_type: the type; its tasks are tracked.
        level: the priority.
        cursor: where the release before stopped.
        selected_by_key: tasks that this release has selected at levels above, by key; updated.
        budget: pages that this release may read; updated.
        excluded: tasks that are left out.

    Attributes:
        cursor: where the next release starts.
        round: where the next release continues, if the budget ended this one.
        full: a key with ready tasks has no room, or is paused.
    """

    def __init__(
        self,
        session: Session,
        task_type: TaskType,
        level: Priority,
        cursor: Cursor,
        selected_by_key: dict[str, int],
        budget: PageBudget,
        excluded: Sequence[int] = (),
    ) -> None:
        self._session = session
        self._type = task_type
        self._level = level
        self._selected_by_key = selected_by_key
        self._budget = budget
        self._excluded = excluded
        self.cursor = cursor
        self.round: Round | None = None
        self.full = False

    async def select(self, selected: list[int], limit: int, continued: Round | None = None) -> bool:
        """Fills `selected` up to `limit`; True when further tasks may be released at once.

        Args:
            selected: the tasks of this release, in order; extended.
            limit: most tasks.
            continued: the round of an earlier release that this one continues.
        """
        if continued is not None:
            end = continued.start if continued.wrapped else None
            page = await self._page(selected, limit, continued.first, end)
            return await self._select_pages(page, None, continued, selected, limit)
        start = self.cursor.first
        begun = Round(self._level, start, start, wrapped=False, selected=False)
        page = await self._page(selected, limit, start)
        if len(page) == KEYS_PER_PAGE:
            return await self._select_pages(page, None, begun, selected, limit)
        rest = await self._page(selected, limit, "", start) if start else []
        if len(rest) == KEYS_PER_PAGE:
            return await self._select_pages(page, rest, begun, selected, limit)
        return self._select([*page, *rest], selected, limit, one_round=False)

    async def _select_pages(
        self,
        page: list[KeyQueue],
        rest: list[KeyQueue] | None,
        current: Round,
        selected: list[int],
        limit: int,
    ) -> bool:
        """One round over several pages of keys; `rest` is the page from "" on, if it was read."""
        before = len(selected)
        while True:
            if self._select(page, selected, limit, one_round=True) or len(selected) >= limit:
                return True
            current = current._replace(selected=current.selected or len(selected) > before)
            if len(page) == KEYS_PER_PAGE:
                current = current._replace(first=successor(page[-1].concurrency_key))
            elif not current.wrapped and current.start:
                current = current._replace(first="", wrapped=True)
            else:
                return current.selected
            if not current.first and rest is not None:
                page = rest
                continue
            if self._budget.left <= 0:
                self.round = current
                return True
            self._budget.left -= 1
            page = await self._page(
                selected, limit, current.first, current.start if current.wrapped else None
            )

    async def _page(
        self, selected: list[int], limit: int, first: str, end: str | None = None
    ) -> list[KeyQueue]:
        size = limits.PageSize(self._level, limit - len(selected), KEYS_PER_PAGE, self._excluded)
        return await limits.key_queues(self._session, self._type, size, first, end)

    def _select(self, page: Sequence[KeyQueue], selected: list[int], limit: int, *, one_round: bool) -> bool:
        queues = [self._less_selected(queue) for queue in page]
        if self._type.fair:
            selection = select_round_robin(queues, limit - len(selected), self.cursor, one_round=one_round)
        else:
            cursor = Cursor(page[-1].concurrency_key) if one_round and page else self.cursor
            selection = select_in_order(queues, limit - len(selected), cursor)
        self.cursor = selection.cursor
        self.full = self.full or any(queue.room <= 0 for queue in queues)
        selected += selection.ids
        ids = set(selection.ids)
        for queue in page if ids else ():
            key = queue.concurrency_key
            self._selected_by_key[key] = self._selected_by_key.get(key, 0) + len(ids.intersection(queue.ids))
        return selection.truncated

    def _less_selected(self, queue: KeyQueue) -> KeyQueue:
        """The queue with its room reduced by the tasks of its key selected at levels above."""
        selected = self._selected_by_key.get(queue.concurrency_key, 0)
        if not selected:
            return queue
        return replace(queue, room=queue.room - selected)
