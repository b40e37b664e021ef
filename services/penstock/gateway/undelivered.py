"""Returns tasks that their workers never received, without charging their attempts.

In doubt it tries again until the process ends: what loses an answer often cuts off Kafka, too, and
then the gateway begins again. Only at the end of the process the tasks wait for their leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult, handed_back

log = logging.getLogger(__name__)

# Seconds that a stop waits for Kafka to take the returned tasks.
STOP_S = 5.0


class UndeliveredTasks:
    """Tasks that are being returned.

    Args:
        send: writes results of a worker, and the ends of their leases.
        kept: workers and tasks that the next gateway of this process returns.
    """

    def __init__(
        self,
        send: Callable[[str, Sequence[StageResult]], Awaitable[None]],
        kept: list[tuple[str, Sequence[ReadyTask]]],
    ) -> None:
        self._send = send
        self._kept = kept
        self._returning: set[asyncio.Task[None]] = set()

    def resume(self) -> None:
        """Returns what the gateway before this one in the process has not."""
        kept = self._kept.copy()
        self._kept.clear()
        for worker, tasks in kept:
            self.add(worker, tasks)

    def add(self, worker: str, tasks: Sequence[ReadyTask]) -> None:
        """Returns tasks of a worker in the background."""
        if not tasks:
            return
        returning = asyncio.create_task(self._return(worker, tasks))
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)

    async def close(self) -> None:
        """Waits until all are returned, for at most `STOP_S` seconds; keeps the others."""
        if not self._returning:
            return
        _done, late = await asyncio.wait(self._returning, timeout=STOP_S)
        for returning in late:
            returning.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _return(self, worker: str, tasks: Sequence[ReadyTask]) -> None:
        log.info(
            "A worker did not receive tasks that were claimed for it; they are retried",
            extra={"event": "tasks_returned", "worker": worker, "tasks": len(tasks)},
        )
        reason = "the worker did not receive the task"
        results = [handed_back(task.fence, reason) for task in tasks]
        try:
            await retry_until_available(
                lambda: self._send(worker, results), waiting_for="return of tasks that were not received"
            )
        except asyncio.CancelledError:
            self._kept.append((worker, tasks))
            log.warning(
                "Tasks that were not delivered are not returned; if the process ends, they wait for their leases",
                extra={"event": "return_failed", "worker": worker, "tasks": len(tasks)},
            )
            raise
