"""The handler pool: runs a bounded number of attempts; others wait in order of priority.

Suspects (`core.suspects`) run one at a time. Before one begins, the platform must know: a handler
that kills the process leaves no time to report it afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.core.completion import Outcome
from penstock.core.suspects import Isolation, SuspectGate
from penstock.worker.execution import Execution, returned_result
from penstock.worker.priority_semaphore import PriorityQueue

log = logging.getLogger(__name__)

# Seconds that cancelled handlers get to end during a drain.
CANCEL_S = 1.0
# A suspect that has run for so long lets others begin beside it. Otherwise the loss of a host with
# thousands of long tasks would hold them up for days.
TURN_S = 3.0
# Attempts that wait for a handler go back when none began for so long: another worker may be idle.
STUCK_S = 0.5
ALONE_REASON = "a suspect runs alone on the worker"
# Characters of a failure's message in the log; the task has the whole message and the traceback.
ERROR_CHARS = 500


class HandlerPool:
    """Runs attempts.

    Args:
        execution: runs one attempt.
        report: called with each result.
        size: most attempts at once.
        announce: tells the platform that a suspect begins; `begin` follows when it knows.
        ended: called with a suspect that has ended; `end_turn` follows when its result is stored.
            Otherwise the next attempt could kill the process before, and the loss would be charged
            to both.
        hold: called with True when the worker must take no further attempts for now, because a
            suspect that runs alone lasts, and with False when it may again.
    """

    def __init__(
        self,
        execution: Execution,
        report: Callable[[StageResult], None],
        size: int,
        announce: Callable[[AttemptId], object],
        ended: Callable[[AttemptId], object],
        hold: Callable[[bool], object] = lambda _holds: None,
    ) -> None:
        self._execution = execution
        self._report = report
        self._size = size
        self._running: dict[AttemptId, tuple[asyncio.Task[None], ReadyTask]] = {}
        self._backlog = PriorityQueue()
        self._announce = announce
        self._ended = ended
        self._hold = hold
        self._gate: SuspectGate[AttemptId] = SuspectGate()
        # Suspects that have not begun.
        self._suspects: dict[AttemptId, ReadyTask] = {}
        self._closed = False
        # When an attempt last began, or the gate was closed; and the next look at those that wait.
        self._moved_s = 0.0
        self._look: asyncio.TimerHandle | None = None
        # When the gate will have been closed for a turn; whether it has been.
        self._gate_timer: asyncio.TimerHandle | None = None
        self._holds = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start_all(self, claimed: list[ReadyTask]) -> None:
        """Adds attempts to the backlog and starts as many as the pool has room for."""
        if not self._backlog:
            self._moved_s = asyncio.get_running_loop().time()
        for ready in claimed:
            if self._closed:
                self._report(returned_result(ready, "the worker is stopping"))
            elif self._holds:
                self._report(returned_result(ready, ALONE_REASON))
            elif ready.isolation is None:
                self._backlog.add(ready)
            else:
                attempt_id = ready.fence.attempt_id
                self._suspects[attempt_id] = ready
                self._gate.add(attempt_id, ready.isolation)
        self._fill()

    def waits(self, attempt_id: AttemptId) -> bool:
        """Whether an attempt waits for a handler; may be called from any thread."""
        return attempt_id in self._backlog

    def begin(self, attempt_id: AttemptId) -> None:
        """Begins a suspect that was announced, unless it was dropped or returned meanwhile."""
        ready = self._suspects.pop(attempt_id, None)
        if ready is None:
            return
        self._start(ready)
        if ready.isolation is Isolation.ONE:
            asyncio.get_running_loop().call_later(TURN_S, self._outlive_turn, attempt_id)

    def end_turn(self, attempt_id: AttemptId) -> None:
        """Lets the next suspect begin, if this one has its turn."""
        self._gate.end_turn(attempt_id)
        self._fill()

    def _outlive_turn(self, attempt_id: AttemptId) -> None:
        self._gate.end_turn(attempt_id, outlived=True)
        self._fill()

    def drop(self, attempt_ids: list[AttemptId]) -> None:
        """Ends attempts without a result: their handlers are cancelled."""
        self._backlog.drop(set(attempt_ids))
        self._gate.drop(attempt_ids)
        for attempt_id in attempt_ids:
            self._suspects.pop(attempt_id, None)
            entry = self._running.pop(attempt_id, None)
            if entry is not None:
                entry[0].cancel()
        self._fill()

    async def drain(self, timeout_s: float) -> None:
        """Returns the backlog at once, and running attempts after `timeout_s` seconds."""
        self._closed = True
        while self._backlog:
            self._report(returned_result(self._backlog.take(), "the worker is stopping"))
        for ready in self._suspects.values():
            self._report(returned_result(ready, "the worker is stopping"))
        self._gate.drop(self._suspects)
        self._suspects.clear()
        if self._running:
            log.info(
                "Draining while handlers are running",
                extra={"event": "drain_started", "handlers": len(self._running)},
            )
            await asyncio.wait(self._tasks(), timeout=timeout_s)
        for task in self._tasks():
            task.cancel()
        if self._running:
            # Bounded, because a handler may swallow its cancellation.
            await asyncio.wait(self._tasks(), timeout=CANCEL_S)
        for attempt_id, (_task, ready) in list(self._running.items()):
            reason = f"the worker stopped after waiting {timeout_s:g} s for the handler"
            self._settle(attempt_id, returned_result(ready, reason))

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {task for task, _ready in self._running.values()}

    async def watch(self) -> None:
        """Waits until an attempt ends without a result, which is a bug of this package.

        Raises:
            Exception: of that attempt. It ends the worker: otherwise the lease would be renewed
                without end.
        """
        await self._failed

    async def _run(self, ready: ReadyTask) -> None:
        attempt_id = ready.fence.attempt_id

        def abandon(result: StageResult) -> None:
            assert result.error is not None
            log.warning(
                "A handler did not end after its cancellation",
                extra={
                    "event": "handler_abandoned",
                    **ready.fence.ids(),
                    "task_type": ready.type,
                    "error": result.error.message,
                },
            )
            self._settle(attempt_id, result)

        result = await self._execution.run(ready, abandon)
        if result is not None:
            self._settle(attempt_id, result)

    def _settle(self, attempt_id: AttemptId, result: StageResult) -> None:
        """Reports an attempt unless it is settled or dropped, and starts the next one."""
        entry = self._running.pop(attempt_id, None)
        if entry is None:
            return
        if result.outcome is Outcome.FAIL:
            assert result.error is not None
            log.info(
                "An attempt failed",
                extra={
                    "event": "attempt_failed",
                    **entry[1].fence.ids(),
                    "task_type": entry[1].type,
                    "error": f"{result.error.kind}: {result.error.message[:ERROR_CHARS]}",
                },
            )
        self._report(result)
        if entry[1].isolation is not None:
            self._ended(attempt_id)
        self._fill()

    def _has_room(self) -> bool:
        announced = len(self._suspects) - len(self._gate)
        return len(self._running) + announced < self._size

    def _fill(self) -> None:
        if self._closed:
            return
        while self._has_room() and (suspect := self._gate.take(len(self._running))) is not None:
            self._announce(suspect)
        while self._backlog and self._has_room() and not self._gate.closed:
            self._start(self._backlog.take())
        if self._backlog and self._look is None:
            self._look = asyncio.get_running_loop().call_later(STUCK_S, self._return_stuck)
        self._watch_gate()

    def _watch_gate(self) -> None:
        """Begins to hold when the gate stays closed for a turn, and ends that when it opens."""
        if self._gate.closed:
            if self._gate_timer is None:
                self._gate_timer = asyncio.get_running_loop().call_later(TURN_S, self._begin_hold)
            return
        if self._gate_timer is not None:
            self._gate_timer.cancel()
            self._gate_timer = None
        if self._holds:
            self._holds = False
            self._hold(self._holds)

    def _begin_hold(self) -> None:
        if self._closed:
            return
        self._holds = True
        self._hold(self._holds)
        behind = self._gate.behind_alone()
        log.info(
            "A suspect runs alone for long; waiting tasks go to other workers",
            extra={"event": "worker_held_by_suspect", "attempts": len(self._backlog) + len(behind)},
        )
        while self._backlog:
            self._report(returned_result(self._backlog.take(), ALONE_REASON))
        self._gate.drop(behind)
        for attempt_id in behind:
            self._report(returned_result(self._suspects.pop(attempt_id), ALONE_REASON))

    def _return_stuck(self) -> None:
        """Returns the backlog if no attempt began for `STUCK_S`; else looks again later."""
        loop = asyncio.get_running_loop()
        self._look = None
        if self._closed or not self._backlog:
            return
        if self._gate.closed:
            # After a turn the worker holds. Before, it still pulls: it would get the same tasks
            # again.
            self._moved_s = loop.time()
        left_s = self._moved_s + STUCK_S - loop.time()
        if left_s > 0:
            self._look = loop.call_later(left_s, self._return_stuck)
            return
        log.info(
            "No handler became free; waiting tasks go to other workers",
            extra={"event": "backlog_returned", "attempts": len(self._backlog)},
        )
        while self._backlog:
            self._report(returned_result(self._backlog.take(), "no handler of the worker became free"))

    def _start(self, ready: ReadyTask) -> None:
        self._moved_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._run(ready))
        self._running[ready.fence.attempt_id] = (task, ready)
        task.add_done_callback(partial(self._on_done, ready))

    def _on_done(self, ready: ReadyTask, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            attempt_id = ready.fence.attempt_id
            if not self._closed and attempt_id in self._running:
                # Neither `drop` nor `drain` cancelled it, so its handler did.
                self._settle(attempt_id, self._execution.cancelled_itself(ready))
        elif (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)
