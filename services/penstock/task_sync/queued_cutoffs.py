"""Cutoffs of queued tasks for the recheck, read between two releases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.contracts.task_type import TaskType
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.task_sync.owned_topics import OwnedTopics
from penstock.task_sync.ready_topics import ReadyTopic


class QueuedCutoffs:
    """The owned types that may have queued tasks, and their cutoffs.

    Args:
        session: the owner of the types.
        topics: of the owned types.
        wake: called when a request waits for `answer`.

    Attributes:
        may_have_queued: set while a task of an owned type may be queued.
    """

    def __init__(self, session: Session, topics: OwnedTopics, wake: Callable[[], None]) -> None:
        self._session = session
        self._topics = topics
        self._wake = wake
        self._request: tuple[Sequence[str], asyncio.Future[dict[str, str]]] | None = None
        self.may_have_queued = asyncio.Event()

    def on_queued(self, topic: ReadyTopic) -> None:
        """A task of the topic's type may be queued from now on."""
        topic.may_have_queued = True
        self.may_have_queued.set()

    def types(self) -> list[TaskType]:
        """Owned types that may have queued tasks."""
        return [topic.type for topic in self._topics.ready_topics() if topic.may_have_queued]

    async def read(self, type_names: Sequence[str]) -> dict[str, str]:
        """As `postgres.release.queued_cutoffs`; waits for `answer`, one request at a time."""
        future: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._request = (type_names, future)
        self._wake()
        return await future

    async def answer(self) -> None:
        """Answers the request, if one waits; call it while no release is under way."""
        if self._request is None:
            return
        (type_names, future), self._request = self._request, None
        # Types that were transferred meanwhile are left out: their new owner may be releasing now.
        owned = [name for name in type_names if self._topics.get(name) is not None]
        cutoffs = await release.queued_cutoffs(self._session, owned)
        for name in owned:
            topic = self._topics.get(name)
            if topic is not None:
                topic.may_have_queued = name in cutoffs
        if not self.types():
            self.may_have_queued.clear()
        if not future.done():
            future.set_result(cutoffs)
