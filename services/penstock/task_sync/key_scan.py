"""Selects tasks among the concurrency keys of one level, one page of keys a statement."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.fair_queueing import Cursor, KeyQueue, select_by_id, select_round_robin, successor
from penstock.core.task import Priority
from penstock.postgres import limits
from penstock.postgres.session import Session
from penstock.postgres.types import TaskType

# Most concurrency keys that one statement reads.
KEYS_PER_PAGE = 256


class KeyScan:
    """One release of one level: goes round its keys from the cursor on.

    Args:
        session: the owner of the type.
        task_type: the type; its tasks are tracked.
        level: the priority.
        cursor: where the release before stopped.
        selected_by_key: tasks that this release has selected at levels above, by key; updated.

    Attributes:
        cursor: where the next release starts.
        full: a key with ready tasks has no room, or is paused.
    """

    def __init__(
        self,
        session: Session,
        task_type: TaskType,
        level: Priority,
        cursor: Cursor,
        selected_by_key: dict[str, int],
    ) -> None:
        self._session = session
        self._type = task_type
        self._level = level
        self._selected_by_key = selected_by_key
        self.cursor = cursor
        self.full = False

    async def select(self, selected: list[int], limit: int) -> bool:
        """Fills `selected` up to `limit`; True when further tasks may be released at once."""
        start = self.cursor.first
        page = await self._page(selected, limit, start)
        if len(page) == KEYS_PER_PAGE:
            return await self._select_pages(page, None, start, selected, limit)
        rest = await self._page(selected, limit, "", start) if start else []
        if len(rest) == KEYS_PER_PAGE:
            return await self._select_pages(page, rest, start, selected, limit)
        return self._select([*page, *rest], selected, limit, one_round=False)

    async def _select_pages(
        self, page: list[KeyQueue], rest: list[KeyQueue] | None, start: str, selected: list[int], limit: int
    ) -> bool:
        """One round over several pages of keys; `rest` is the page from "" on, if it was read."""
        before = len(selected)
        wrapped = False
        while True:
            if self._select(page, selected, limit, one_round=True) or len(selected) >= limit:
                return True
            if len(page) == KEYS_PER_PAGE:
                end = start if wrapped else None
                page = await self._page(selected, limit, successor(page[-1].concurrency_key), end)
            elif not wrapped and start:
                wrapped = True
                page = rest if rest is not None else await self._page(selected, limit, "", start)
            else:
                return len(selected) > before

    async def _page(
        self, selected: list[int], limit: int, first: str, end: str | None = None
    ) -> list[KeyQueue]:
        size = limits.PageSize(self._level, limit - len(selected), KEYS_PER_PAGE)
        return await limits.key_queues(self._session, self._type, size, first, end)

    def _select(self, page: Sequence[KeyQueue], selected: list[int], limit: int, *, one_round: bool) -> bool:
        queues = [self._less_selected(queue) for queue in page]
        if self._type.fair:
            selection = select_round_robin(queues, limit - len(selected), self.cursor, one_round=one_round)
        else:
            cursor = Cursor(page[-1].concurrency_key) if one_round and page else self.cursor
            selection = select_by_id(queues, limit - len(selected), cursor)
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
        return KeyQueue(queue.concurrency_key, queue.ids, queue.room - selected, queue.weight, queue.more)
