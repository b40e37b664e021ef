"""Methods of `Client` about waiting tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.client.transport import Document, Transport, pages, query_of

BACKLOG_PAGE_SIZE = 1_000


class BacklogMethods:
    """The methods of `Client` about waiting tasks; the API's description defines the documents."""

    async def why(self: Transport, task_id: int) -> Document:
        """Why a task is waiting, or what it does instead: one `Why` document.

        Raises:
            NotFound: no task has this id.
        """
        return await self._request("GET", f"/tasks/{task_id}/why")

    async def backlog(
        self: Transport,
        type: str | None = None,  # noqa: A002 (the platform's word for it)
        *,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """The number of waiting tasks by type, priority and stage: one `BacklogLine` document each.

        Args:
            type: only this type; None is all.
            limit: most lines; None is all.
        """
        async for line in pages(self, "/backlog", "backlog", query_of(type=type), limit, BACKLOG_PAGE_SIZE):
            yield line
