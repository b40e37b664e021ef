"""The workers of a pipeline: each runs attempts by the code of a worker process."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from penstock.contracts.progress import Progress
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.objects import ObjectStore
from penstock.testing.models import LogLine
from penstock.worker.handler_pool import HandlerPool
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.registered import Registered

# More bytes than a buffer has.
_ALL_BYTES = 1 << 40


class Records:
    """Logs and reports of the handlers of all workers, by attempt."""

    def __init__(self) -> None:
        self.lines: defaultdict[AttemptId, list[LogLine]] = defaultdict(list)
        self.progress: defaultdict[AttemptId, list[Progress]] = defaultdict(list)
        self._buffers: list[LogBuffer] = []

    def buffer(self, worker_id: str, registered: Registered) -> LogBuffer | None:
        """The buffer of a worker's logs; None if it captures none."""
        if registered.settings.task_logs == "off":
            return None
        buffer = LogBuffer(worker_id, registered.redactor, lambda _urgent: None)
        self._buffers.append(buffer)
        return buffer

    def of_task(self, task_id: int) -> tuple[list[LogLine], list[Progress]]:
        """The lines and the reports of a task, in the order of its attempts."""
        self.collect()
        lines = [line for key in sorted(self.lines) if key.task_id == task_id for line in self.lines[key]]
        of_task = (key for key in sorted(self.progress) if key.task_id == task_id)
        return lines, [report for key in of_task for report in self.progress[key]]

    def collect(self) -> None:
        """Takes the lines out of the buffers, as the service tasklogs receives them."""
        for buffer in self._buffers:
            while chunks := buffer.take(_ALL_BYTES):
                for chunk in chunks:
                    self.lines[chunk.run.attempt_id] += [
                        LogLine(line[1], line[2], line[3], line[4] if len(line) > 4 else {})
                        for line in chunk.lines
                    ]


class Host:
    """One worker, and the platform of its handlers (`worker.ports.Platform`).

    Args:
        number: makes its id.
        registered: what is registered with the worker.
        objects: of large contexts.
        records: receives logs and reports.
        report: called with this worker and each result.

    Attributes:
        id: of the worker.
        held: the attempts that it has claimed and not ended.
        silent: whether its heartbeats arrive no more.
        results: those that wait until a worker that is cut off is back.
    """

    def __init__(
        self,
        number: int,
        registered: Registered,
        objects: ObjectStore,
        records: Records,
        report: Callable[[Host, StageResult], None],
    ) -> None:
        self.id = f"worker-{number}"
        self.held: dict[AttemptId, ReadyTask] = {}
        self.silent = False
        self.results: list[StageResult] = []
        self._records = records
        self._report = report
        self._pool = HandlerPool(
            registered.execution(objects, records.buffer(self.id, registered), self.report),
            self,
            registered.slots,
            registered.concurrency,
        )
        self._watched = asyncio.ensure_future(self._pool.watch())

    def add(self, result: StageResult) -> None:
        """Passes a result on."""
        self._report(self, result)

    def report(self, attempt_id: AttemptId, progress: Progress) -> None:
        """Notes a report of a handler."""
        self._records.progress[attempt_id].append(progress)

    def announce(self, attempt_id: AttemptId) -> None:
        """Begins a suspect: the platform knows it at once."""
        asyncio.get_running_loop().call_soon(self._pool.begin, attempt_id)

    def ended(self, attempt_id: AttemptId) -> None:
        """Ends the turn of a suspect: its result is stored at once."""
        asyncio.get_running_loop().call_soon(self._pool.end_turn, attempt_id)

    def block(self, _blocked: bool) -> None:
        """Nothing: the pool itself hands back what comes."""

    def start(self, ready: Sequence[ReadyTask]) -> None:
        """Starts attempts, as many as the worker has room for."""
        self.held |= {each.fence.attempt_id: each for each in ready}
        self._pool.start_all(list(ready))

    def has_begun(self, attempt_id: AttemptId) -> bool:
        """Whether the handler of an attempt has begun."""
        return not self._pool.waits(attempt_id)

    def drop(self, attempt_ids: Iterable[AttemptId]) -> None:
        """Cancels the handlers of attempts, which then have no result."""
        dropped = [attempt_id for attempt_id in attempt_ids if self.held.pop(attempt_id, None)]
        self._pool.drop(dropped)

    def running(self) -> dict[AttemptId, asyncio.Task[None]]:
        """The tasks of the handlers that run."""
        return dict(self._pool.running)

    def require_healthy(self) -> None:
        """Raises what ended an attempt without a result, which is a bug of Penstock.

        Raises:
            Exception: of that attempt.
        """
        if self._watched.done():
            self._watched.result()

    async def close(self) -> None:
        """Ends all handlers."""
        await self._pool.drain(0.0)
        self._watched.cancel()
