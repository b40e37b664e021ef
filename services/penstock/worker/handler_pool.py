"""The handler pool: runs a bounded number of attempts; others wait in order of priority.

Suspects (`core.suspects`) run one at a time. Before one begins, the platform must know: a handler
that kills the process leaves no time to report it afterwards.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType

from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.core.attempt import AttemptId
from penstock.core.completion import Outcome
from penstock.core.suspects import Isolation
from penstock.worker.backlog import Backlog, Surplus
from penstock.worker.execution import Execution
from penstock.worker.metrics import CANCELLED, AttemptCounts
from penstock.worker.ports import Platform
from penstock.worker.results import returned_result
from penstock.worker.suspects import Suspects

log = logging.getLogger(__name__)

# Seconds that cancelled handlers get to end during a drain.
CANCEL_S = 1.0
TURN_S = 3.0
STUCK_S = 0.5
# Seconds between two looks at those that wait, at least.
LOOK_S = 0.05
LIMIT_REASON = "the stage runs at its limit on this worker"
ALONE_REASON = "a suspect runs alone on the worker"
# Characters of a failure's message in the log; the task has the whole message and the traceback.
ERROR_CHARS = 500


class HandlerPool:
    """Runs attempts.

    Args:
        execution: runs one attempt.
        platform: receives results and the turns of suspects.
        size: most attempts at once.
        limits: most attempts at once by (type, stage), for stages with a limit of their own.
        turn_s: seconds after which a suspect lets others begin beside it. Otherwise the loss of a
            host with thousands of long tasks would hold them up for days.
        stuck_s: seconds without the begin of an attempt after which those that wait go back:
            another worker may be idle.

    Attributes:
        counts: of the attempts that have ended.
    """

    def __init__(
        self,
        execution: Execution,
        platform: Platform,
        size: int,
        limits: Mapping[tuple[str, str], int] = MappingProxyType({}),
        *,
        turn_s: float = TURN_S,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._turn_s = turn_s
        self._stuck_s = stuck_s
        # Each attempt has a copy of this context: no other one sees what its handler sets.
        self._context = contextvars.copy_context()
        self.counts = AttemptCounts(execution.stages)
        self._execution = execution
        self._platform = platform
        self._size = size
        self._running: dict[AttemptId, tuple[asyncio.Task[None], ReadyTask]] = {}
        self._backlog = Backlog(limits)
        self._suspects = Suspects()
        self._closed = False
        # When an attempt last began, or a suspect began to block others; and the next look at those
        # that wait.
        self._moved_s = 0.0
        self._look: asyncio.TimerHandle | None = None
        # When a suspect will have blocked others for a turn; whether it has.
        self._block_timer: asyncio.TimerHandle | None = None
        self._blocked = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start_all(self, claimed: list[ReadyTask]) -> None:
        """Adds attempts to the backlog and starts as many as the pool has room for."""
        now_s = asyncio.get_running_loop().time()
        if not self._backlog:
            self._moved_s = now_s
        for ready in claimed:
            if self._closed:
                self._hand_back(ready, "the worker is stopping")
            elif self._blocked:
                self._hand_back(ready, ALONE_REASON)
            elif ready.isolation is None:
                self._backlog.add(ready, now_s)
            else:
                self._suspects.add(ready)
        self._return_surplus(self._backlog.take_surplus(now_s))
        self._fill()

    @property
    def is_busy(self) -> bool:
        """Whether an attempt runs; may be asked from any thread."""
        return bool(self._running)

    @property
    def running_attempts(self) -> list[ReadyTask]:
        """The attempts that run; may be asked from any thread."""
        return [ready for _task, ready in list(self._running.values())]

    @property
    def waiting(self) -> int:
        """How many attempts wait for a handler; may be asked from any thread."""
        return len(self._backlog) + len(self._suspects)

    def waits(self, attempt_id: AttemptId) -> bool:
        """Whether an attempt waits for a handler; may be called from any thread."""
        return attempt_id in self._backlog

    @property
    def running(self) -> Mapping[AttemptId, asyncio.Task[None]]:
        """The tasks of the attempts whose handlers run."""
        return {attempt_id: task for attempt_id, (task, _ready) in self._running.items()}

    def begin(self, attempt_id: AttemptId) -> None:
        """Begins a suspect that was announced, unless it was dropped or returned meanwhile."""
        ready = self._suspects.begin(attempt_id)
        if ready is None:
            return
        self._start(ready)
        if ready.isolation is Isolation.ONE:
            asyncio.get_running_loop().call_later(self._turn_s, self._outlive_turn, attempt_id)

    def end_turn(self, attempt_id: AttemptId) -> None:
        """Lets the next suspect begin, if this one has its turn."""
        self._suspects.end_turn(attempt_id)
        self._fill()

    def _outlive_turn(self, attempt_id: AttemptId) -> None:
        self._suspects.end_turn(attempt_id, outlived=True)
        self._fill()

    def drop(self, attempt_ids: Collection[AttemptId]) -> None:
        """Ends attempts without a result: their handlers are cancelled."""
        self._backlog.drop(set(attempt_ids))
        for suspect in self._suspects.drop(attempt_ids):
            self._backlog.end(suspect, asyncio.get_running_loop().time())
        for attempt_id in attempt_ids:
            entry = self._running.pop(attempt_id, None)
            if entry is not None:
                self.counts.add(entry[1], CANCELLED)
                entry[0].cancel()
        self._fill()

    async def drain(self, timeout_s: float, hurry: asyncio.Event | None = None) -> None:
        """Returns the backlog at once, and running attempts after `timeout_s` seconds.

        Args:
            timeout_s: seconds that running handlers get.
            hurry: returns running attempts when it is set.
        """
        self._closed = True
        for ready in (*self._backlog.take_all(), *self._suspects.take_all()):
            self._hand_back(ready, "the worker is stopping")
        if self._running:
            log.info(
                "Draining while handlers are running; a second signal hands their tasks back at once",
                extra={"event": "drain_started", "handlers": len(self._running), "timeout_s": timeout_s},
            )
            hurried = asyncio.ensure_future((hurry or asyncio.Event()).wait())
            ended = asyncio.ensure_future(asyncio.wait(self._tasks()))
            await asyncio.wait({hurried, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            ended.cancel()
        for task in self._tasks():
            task.cancel()
        if self._running:
            # Bounded, because a handler may swallow its cancellation.
            await asyncio.wait(self._tasks(), timeout=CANCEL_S)
        for attempt_id, (_task, ready) in list(self._running.items()):
            reason = "the worker stopped, and the handler did not end in time"
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
        attempt_id = ready.attempt_id

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
            self._context.run(self._settle, attempt_id, result)
            # Also that of an attempt which was dropped before.
            self._context.run(self._on_ended, ready)

        result = await self._execution.run(ready, abandon)
        if result is not None:
            self._context.run(self._settle, attempt_id, result)

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
                    "traceback": result.error.traceback,
                },
            )
        self.counts.add(entry[1], result.outcome.value)
        self._platform.add(result)
        if self._backlog.has_limits:
            self._backlog.end(entry[1], asyncio.get_running_loop().time())
        if entry[1].isolation is not None:
            self._platform.ended(attempt_id)
        self._fill()

    def _has_room(self) -> bool:
        return len(self._running) + self._suspects.announced < self._size

    def _fill(self) -> None:
        if self._closed:
            return
        while (
            self._has_room()
            and (suspect := self._suspects.take(len(self._running), self._backlog.has_room)) is not None
        ):
            # From now on, since another attempt could begin before the platform knows.
            self._backlog.begin(suspect, asyncio.get_running_loop().time())
            self._platform.announce(suspect.attempt_id)
        while (
            self._has_room()
            and not self._suspects.blocks_others
            and (ready := self._backlog.take()) is not None
        ):
            self._start(ready)
        if self._backlog and self._look is None:
            self._look = asyncio.get_running_loop().call_later(self._stuck_s, self._return_stuck)
        self._watch_block()

    def _watch_block(self) -> None:
        """Takes no attempts once a suspect has blocked others for a turn, until that ends."""
        if self._suspects.blocks_others:
            if self._block_timer is None:
                self._block_timer = asyncio.get_running_loop().call_later(self._turn_s, self._begin_block)
            return
        if self._block_timer is not None:
            self._block_timer.cancel()
            self._block_timer = None
        if self._blocked:
            self._blocked = False
            self._platform.block(self._blocked)

    def _begin_block(self) -> None:
        if self._closed:
            return
        self._blocked = True
        self._platform.block(self._blocked)
        waiting = [*self._backlog.take_all(), *self._suspects.take_behind_alone()]
        log.info(
            "A suspect runs alone for long; waiting tasks go to other workers",
            extra={"event": "worker_held_by_suspect", "attempts": len(waiting)},
        )
        for ready in waiting:
            self._hand_back(ready, ALONE_REASON)

    def _return_stuck(self) -> None:
        """Returns waiting attempts if none began for `stuck_s`; else looks again later."""
        loop = asyncio.get_running_loop()
        self._look, now_s = None, loop.time()
        if self._closed or not self._backlog:
            return
        if self._suspects.blocks_others:
            # After a turn the worker takes none. Before, it still pulls: it would get the same
            # tasks again.
            self._moved_s = now_s
        else:
            self._return_surplus(self._backlog.take_stuck(now_s, self._stuck_s))
        free = self._backlog.free
        if free and self._moved_s + self._stuck_s <= now_s:
            log.info(
                "No handler became free; waiting tasks go to other workers",
                extra={"event": "backlog_returned", "attempts": len(free)},
            )
            while free:
                self._hand_back(free.take(), "no handler of the worker became free")
        if self._backlog:
            due_s = self._backlog.next_stuck_s(self._stuck_s)
            if free:
                due_s = min(due_s, self._moved_s + self._stuck_s)
            self._look = loop.call_at(max(due_s, now_s + LOOK_S), self._return_stuck)

    def _hand_back(self, ready: ReadyTask, reason: str, delay_ms: int | None = None) -> None:
        self.counts.add(ready, Outcome.HANDED_BACK.value)
        self._platform.add(returned_result(ready, reason, delay_ms))

    def _return_surplus(self, surplus: Iterable[Surplus]) -> None:
        """Hands back attempts whose stage is at its limit, each with its delay."""
        for ready, delay_ms in surplus:
            self._hand_back(ready, LIMIT_REASON, delay_ms)

    def _start(self, ready: ReadyTask) -> None:
        self._moved_s = asyncio.get_running_loop().time()
        if self._backlog.has_limits:
            self._backlog.begin(ready, self._moved_s)
        task = asyncio.create_task(self._run(ready), context=self._context.copy())
        self._running[ready.attempt_id] = (task, ready)
        task.add_done_callback(partial(self._on_done, ready), context=self._context)

    def _on_ended(self, ready: ReadyTask) -> None:
        """Frees the slot of an attempt in its stage, if that has a limit."""
        if self._backlog.has_limits and self._backlog.end(ready, asyncio.get_running_loop().time()):
            self._fill()

    def _on_done(self, ready: ReadyTask, task: asyncio.Task[None]) -> None:
        # Not before a handler that was dropped has ended: its stage may allow no other beside it.
        self._on_ended(ready)
        if task.cancelled():
            attempt_id = ready.attempt_id
            if not self._closed and attempt_id in self._running:
                # Neither `drop` nor `drain` cancelled it, so its handler did.
                self._settle(attempt_id, self._execution.cancelled_itself(ready))
        elif (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)
