"""What waits, and why."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.client.asking import Asking, Document, given, pages

LARGEST_BACKLOG_PAGE = 1_000


class Waiting:
    """The part of `Client` that tells what waits; documents are those of the API's description."""

    async def why(self: Asking, task_id: int) -> Document:
        """Why a task is waiting, or what it does instead: one answer, as of `Why`.

        Raises:
            NotFound: no task has this id.
        """
        return await self._ask("GET", f"/tasks/{task_id}/why")

    async def backlog(
        self: Asking,
        type: str | None = None,  # noqa: A002 (the platform's word for it)
        *,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """How many tasks wait, by type, priority and stage, each as of `BacklogLine`; at most `limit`, by default all lines."""
        query = given(type=type)
        async for line in pages(self, "/backlog", "backlog", query, limit, LARGEST_BACKLOG_PAGE):
            yield line
