"""Methods of the client that return results of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import orjson

from penstock.client.chunks import id_chunks, ids_text
from penstock.client.models import Task
from penstock.client.transport import Transport
from penstock.client.waits import HOLD_S, EndPolls
from penstock.core.task import FINAL, State
from penstock.errors import NotFound, NotSucceeded

# Ended tasks that are read at the same time.
_READ_TOGETHER = 16
# Requests of one call follow each other, so each of several is held briefly.
_HOLD_OF_MANY_S = 1


class _Reader(Transport, Protocol):
    """The parts of `Client` that these methods use."""

    async def get(self, task_id: int) -> Task: ...


class ResultMethods:
    """The methods of `Client` that wait for results."""

    async def as_completed(self: _Reader, ids: Iterable[int]) -> AsyncIterator[Task]:
        """Yields each task once it has ended, with its result, in the order of their ends.

        Raises:
            NotFound: one of the ids is unknown.
        """
        left = dict.fromkeys(ids)
        polls = EndPolls(1.0, HOLD_S)
        while len(left) > 1:
            ended = await ResultMethods._ended(self, [*left], polls.wait_s)
            for start in range(0, len(ended), _READ_TOGETHER):
                some = ended[start : start + _READ_TOGETHER]
                for task in await asyncio.gather(*map(self.get, some)):
                    del left[task.id]
                    yield task
            if not ended:
                await polls.pause()
        for task_id in left:
            yield await ResultMethods._when_ended(self, task_id)

    async def _when_ended(self: _Reader, task_id: int) -> Task:
        """The task once it has ended. The answer that was held until the end has the result."""
        polls = EndPolls(1.0, HOLD_S)
        while True:
            answer = await self._request("GET", f"/tasks/{task_id}", wait_s=polls.wait_s)
            task = Task.from_wire(answer)
            if task.state in FINAL:
                return task
            await polls.pause()

    async def _ended(self: _Reader, ids: list[int], wait_s: int) -> list[int]:
        """Those of the ids whose tasks have ended; the request is held until there is one."""
        ended: list[int] = []
        chunks = [*id_chunks(ids)]
        for chunk in chunks:
            held_s = wait_s if len(chunks) == 1 else min(wait_s, _HOLD_OF_MANY_S)
            body = orjson.dumps({"ids": chunk})
            answer = await self._request("POST", "/tasks/ended", body, wait_s=held_s)
            if answer["unknown"]:
                raise NotFound(f"there is no task {ids_text(answer['unknown'])}")
            ended += answer["ended"]
        return ended

    async def results(self: _Reader, ids: Iterable[int], *, timeout_s: float | None = None) -> list[Task]:
        """Waits until all tasks have ended; returns them with their results, in the given order.

        Raises:
            NotFound: one of the ids is unknown.
            TimeoutError: a task has not ended within `timeout_s` seconds.
        """
        wanted = [*ids]
        async with asyncio.timeout(timeout_s):
            found = {task.id: task async for task in ResultMethods.as_completed(self, wanted)}
        return [found[task_id] for task_id in wanted]

    async def result(self: _Reader, task_id: int, *, timeout_s: float | None = None) -> Any:
        """Waits until a task has succeeded, and returns its result.

        Raises:
            NotFound: no task has this id.
            NotSucceeded: it has ended in another state; the message has its error.
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        [task] = await ResultMethods.results(self, [task_id], timeout_s=timeout_s)
        if task.state is not State.SUCCEEDED:
            why = f": {task.error['kind']}: {task.error['message']}" if task.error else ""
            raise NotSucceeded(f"task {task_id} is {task.state}{why}", task_id, task.state)
        return task.result
