"""Methods of the client that wait for ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

import orjson

from penstock.client.arguments import ids_of
from penstock.client.chunks import id_chunks, ids_text
from penstock.client.models import TaskProgress
from penstock.client.transport import Transport
from penstock.core.task import FINAL, State
from penstock.errors import NotFound

# How long the gateway may hold a request, in seconds.
HOLD_S = 20


class EndPolls:
    """Paces the requests of a client that waits for an end.

    The gateway holds such a request until the end, or for `wait_s` seconds. If an answer comes at
    once instead, the client sleeps between two requests.

    Args:
        every_s: longest sleep between two requests, in seconds.
        hold_s: longest time that the gateway holds a request, in whole seconds.

    Attributes:
        wait_s: of the next request; 0 for the first one, which is answered at once.
    """

    def __init__(self, every_s: float, hold_s: int) -> None:
        self.wait_s = 0
        self._every_s = every_s
        self._hold_s = hold_s
        self._pause_s = min(0.05, every_s)
        self._answered_s = asyncio.get_running_loop().time()

    async def pause(self) -> None:
        """Returns when the next request is due; to be called after each answer."""
        loop = asyncio.get_running_loop()
        held = loop.time() - self._answered_s >= 0.9 * self._hold_s
        if self.wait_s == self._hold_s and not (held and self._hold_s):
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._every_s, self._pause_s * 1.5)
        self.wait_s = self._hold_s
        self._answered_s = loop.time()


class WaitMethods:
    """The methods of `Client` that tell how far tasks are."""

    async def states(self: Transport, ids: Iterable[int]) -> dict[str, int]:
        """The number of tasks by state; unknown ids are not counted."""
        return (await WaitMethods._states(self, ids))[0]

    async def _states(
        self: Transport, ids: Iterable[int], wait_s: int = 0
    ) -> tuple[dict[str, int], Sequence[int]]:
        """The number of tasks by state, and the unknown ids."""
        counts: dict[str, int] = {}
        unknown: list[int] = []
        chunks = [*id_chunks(ids_of(ids))]
        for chunk in chunks:
            body = orjson.dumps({"ids": chunk})
            # Only the last request waits, so that several do not add up their times.
            held_s = wait_s if chunk is chunks[-1] else 0
            answer = await self._request("POST", "/tasks/states", body, wait_s=held_s)
            unknown += answer["unknown"]
            for state, count in answer["states"].items():
                counts[state] = counts.get(state, 0) + count
        return counts, unknown

    async def progress(self: Transport, ids: Iterable[int]) -> dict[int, TaskProgress]:
        """The progress of those of the tasks whose handlers report it, by id.

        At most a hundred for each 10,000 ids, those with the smallest ids.
        """
        found: dict[int, TaskProgress] = {}
        for chunk in id_chunks(ids_of(ids)):
            answer = await self._request("POST", "/tasks/progress", orjson.dumps({"ids": chunk}))
            found |= {task["id"]: TaskProgress.from_wire(task["progress"]) for task in answer["tasks"]}
        return found

    async def watch(
        self: Transport,
        ids: Iterable[int],
        *,
        every_s: float = 1.0,
        on_progress: Callable[[Mapping[int, TaskProgress]], object] | None = None,
    ) -> AsyncIterator[dict[str, int]]:
        """Yields the counts by state at once and after each change, until all tasks have ended.

        Args:
            ids: ids of the tasks.
            every_s: longest time between two polls, in seconds. The end of the last task is
                noticed when it happens.
            on_progress: called with the answer of `progress` after each poll in which it has
                changed.

        Raises:
            NotFound: one of the ids is unknown.
        """
        async for counts in WaitMethods._watch(self, ids, EndPolls(every_s, int(every_s)), on_progress):
            yield counts

    async def _watch(
        self: Transport,
        ids: Iterable[int],
        polls: EndPolls,
        on_progress: Callable[[Mapping[int, TaskProgress]], object] | None = None,
    ) -> AsyncIterator[dict[str, int]]:
        unique = set(ids_of(ids))
        last: dict[str, int] | None = None
        reported: dict[int, TaskProgress] = {}
        while unique:
            counts, unknown = await WaitMethods._states(self, unique, polls.wait_s)
            if missing := len(unique) - sum(counts.values()):
                raise NotFound(f"there is no task {ids_text(unknown) or f'for {missing} of the ids'}")
            if on_progress is not None:
                reports = await WaitMethods.progress(self, unique) if State.RUNNING in counts else {}
                if reports != reported:
                    on_progress(reports)
                    reported = reports
            if counts != last:
                yield counts
                last = counts
            if set(counts) <= FINAL:
                return
            await polls.pause()

    async def wait(self: Transport, ids: Iterable[int], *, timeout_s: float | None = None) -> dict[str, int]:
        """Waits until all tasks have ended, and returns the counts by state.

        Raises:
            NotFound: one of the ids is unknown.
            TimeoutError: a task has not ended within `timeout_s` seconds.
        """
        counts: dict[str, int] = {}
        async with asyncio.timeout(timeout_s):
            async for counts in WaitMethods._watch(self, ids, EndPolls(1.0, HOLD_S)):  # noqa: B007 (the last one is the answer)
                pass
        return counts
