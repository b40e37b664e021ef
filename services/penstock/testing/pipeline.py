"""A pipeline in memory: a worker and the platform, with a clock that a test steps."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import orjson

from penstock.client.models import Draft, Task
from penstock.contracts.task_type import TaskType, read_task_type
from penstock.core.attempt import AttemptId
from penstock.core.operations import Verb
from penstock.core.task import FINAL, State
from penstock.errors import Conflict, PenstockError
from penstock.testing.clock import Clock, LoopTime
from penstock.testing.driver import Driver
from penstock.testing.exits import refusing_exits
from penstock.testing.flow_methods import FlowMethods
from penstock.testing.flow_run import AnyRun, FlowRun
from penstock.testing.logs import capturing_logs
from penstock.testing.models import Attempt, NoEnd, Run, attempt_of, id_of
from penstock.testing.platform import Platform
from penstock.testing.published import SentCallback
from penstock.testing.type_settings import type_settings
from penstock.worker import Worker
from penstock.worker.execution import Stage
from penstock.worker.registration import split_name


class Pipeline(FlowMethods):
    """Runs the stages of a worker in memory, without Kafka and PostgreSQL.

    Handlers run by the code of the worker, and the code of the services decides what follows. Task
    types have the settings of the worker's code, or defaults and the stage that was registered
    first. Use it as `async with Pipeline(worker) as pipeline`, or call `close` at the end.

    The clock stands still until `step`, or until `run` has nothing else to do.

    Args:
        worker: with its handlers. It does not run otherwise.
        types: settings of task types by name, before those of the worker's code: the fields of
            `task-type.schema.json`.
        flows: definitions of flows, those of child flows first: each is a
            `penstock.flows.Flow.definition()`, or the content of a file.
        now: the first moment; by default the real one.
        chance: random numbers from 0 to 1 for the jitter of delays; by default 0, which is the
            longest delay.

    Raises:
        InvalidRecord: a setting of a type is refused; `pointer` is the field at fault.
        SettingsError: a setting of the worker is wrong.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        types: Mapping[str, Mapping[str, Any]] | None = None,
        flows: Iterable[Mapping[str, Any]] = (),
        now: datetime | None = None,
        chance: Callable[[], float] = lambda: 0.0,
    ) -> None:
        registered = worker.registered
        self._registered = dataclasses.replace(
            registered, stages={name: _steady(stage) for name, stage in registered.stages.items()}
        )
        start = now or datetime.now(UTC).replace(microsecond=0)
        self._clock = Clock(start.astimezone(UTC))
        self._types: dict[str, TaskType] = {
            name: read_task_type({"name": name, **settings})
            for name, settings in type_settings(registered, types or {}).items()
        }
        self._definitions = list(flows)
        self._chance = chance
        self._stack = AsyncExitStack()
        # Undone also when the event loop is closed already: it concerns the whole process.
        self._undo = ExitStack()
        self._opened: Platform | None = None
        self._time: LoopTime
        self._driver: Driver
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def now(self) -> datetime:
        """The moment of the pipeline, in UTC."""
        return self._clock.now

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The events that the topic `events` would have, in the order of their transitions."""
        return self._platform.events

    @property
    def callbacks(self) -> Sequence[SentCallback]:
        """The callbacks that the targets would receive; a pipeline calls nothing."""
        return self._platform.callbacks

    @property
    def tasks(self) -> Sequence[Run]:
        """All tasks, in the order of their submission."""
        return [self._run_of(row.id) for row in self._platform.tasks]

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _open(self) -> Platform:
        """Starts the worker when it is first needed."""
        if self._closed:
            raise PenstockError("the pipeline is closed")
        if self._opened is None:
            self._loop = asyncio.get_running_loop()
            self._time = LoopTime(self._loop)
            self._undo.callback(self._time.close)
            self._undo.enter_context(refusing_exits(self._loop))
            await self._stack.enter_async_context(self._registered.lifecycle.running())
            mode = self._registered.settings.task_logs
            self._undo.enter_context(capturing_logs(mode))
            self._opened = Platform(self._clock, self._types, self._registered, self._chance)
            self._stack.push_async_callback(self._opened.close)
            self._driver = Driver(self._clock, self._time, self._opened)
            for definition in self._definitions:
                self._opened.flows.put_definition(definition)
        return self._opened

    @property
    def _platform(self) -> Platform:
        if self._opened is None:
            raise PenstockError("nothing was submitted to the pipeline yet")
        return self._opened

    async def close(self) -> None:
        """Cancels the handlers that run, and calls the functions of `on_stop`."""
        self._closed = True
        with self._undo:
            await self._stack.aclose()

    def close_with_loop(self) -> None:
        """Closes a pipeline whose event loop does not run any more, at the end of a test."""
        if self._loop is None or self._closed:
            return
        if self._loop.is_closed():
            self._closed = True
            self._undo.close()
        else:
            self._loop.run_until_complete(self.close())

    async def run(
        self,
        type: str,  # noqa: A002 (the platform's word for it)
        context: Any = None,
        **fields: Any,
    ) -> Run:
        """Submits a task, and runs it until it ends.

        Handlers run in real time; wherever nothing runs, the clock moves to the next moment at
        which something is due. A task that waits for an event without a timeout, or is paused, does
        not end: the call returns when nothing more is due.

        Args:
            type: task type.
            context: input of the first stage.
            fields: the other arguments of `Client.submit`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
            NoEnd: a stage has no handler, or the task has had 1,000 attempts.
        """
        run = await self._insert(type, context, fields)
        row = self._platform.tasks.get(run.id)
        await self._driver.proceed(row.id, lambda: row.state in FINAL)
        return run

    async def run_stage(self, name: str, context: Any = None, **fields: Any) -> Run:
        """Runs one attempt of one stage, and pauses the task before anything else of it runs.

        `run.outcomes` has the outcome. After `Next`, `run.stage` and `run.context` are the next
        stage and its context. `resume` continues the task.

        Args:
            name: `type.stage`, as of `Worker.stage`.
            context: input of the stage.
            fields: the other arguments of `Client.submit`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
            NoEnd: the stage has no handler.
        """
        type_name, stage = split_name(name)
        run = await self._insert(type_name, context, {**fields, "stage": stage})
        row = self._platform.tasks.get(run.id)
        await self._driver.proceed(row.id, lambda: bool(row.attempts))
        if (reason := self._platform.why_endless(row.id)) is not None:
            raise NoEnd(reason)
        self._platform.tasks.change(row, Verb.PAUSE)
        return run

    async def submit(
        self,
        type: str,  # noqa: A002 (the platform's word for it)
        context: Any = None,
        **fields: Any,
    ) -> Run:
        """Submits a task, and runs what can run now; the clock stands still.

        Args:
            type: task type.
            context: input of the first stage.
            fields: the other arguments of `Client.submit`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
        """
        run = await self._insert(type, context, fields)
        await self.settle()
        return run

    async def _insert(self, type_name: str, context: Any, fields: Mapping[str, Any]) -> Run:
        platform = await self._open()
        draft = Draft(type=type_name, context=context, **fields)
        # As the client sends it, and the gateway reads it.
        row, created = platform.submit(orjson.dumps(draft.to_wire()))
        return self._run_of(row.id, created=created)

    async def settle(self) -> None:
        """Runs what can run now; the clock stands still.

        Returns when each handler has ended, sleeps (`asyncio.sleep`), or does nothing for half a
        second: then it waits for the test.
        """
        await self._open()
        await self._driver.settle()

    async def step(
        self,
        delta: timedelta | None = None,
        *,
        seconds: float = 0.0,
        minutes: float = 0.0,
        hours: float = 0.0,
        days: float = 0.0,
    ) -> None:
        """Lets time pass, from one moment at which something is due to the next.

        Delays, back-off, `run_at`, leases of lost workers, timeouts of handlers and their
        `asyncio.sleep` follow. Handlers get real time as in `settle`.

        Args:
            delta: how much time passes; or the sum of the others.
            seconds: seconds.
            minutes: minutes.
            hours: hours.
            days: days.

        Raises:
            ValueError: it is negative.
        """
        delta = delta or timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if delta < timedelta(0):
            raise ValueError(f"step({delta}): time does not go back")
        await self._open()
        await self._driver.step(delta.total_seconds())

    async def cancel(self, run: Run | int) -> bool:
        """Cancels a task; its handler is cancelled as well. Returns whether this call did it.

        Raises:
            NotFound: no task has this id.
            Conflict: it has ended otherwise.
        """
        platform = await self._open()
        row = platform.tasks.get(id_of(run))
        cancelled = platform.cancel(row.id)
        if not cancelled and row.state is not State.CANCELLED:
            raise Conflict(f"task {row.id} has already {row.state}: it can no longer be cancelled")
        await self.settle()
        return cancelled

    async def pause(self, run: Run | int) -> bool:
        """Pauses a task, if running at the end of its stage; returns whether it changes."""
        return await self._change(run, Verb.PAUSE)

    async def resume(self, run: Run | int) -> bool:
        """Resumes a paused task; returns whether it changes."""
        return await self._change(run, Verb.RESUME)

    async def recover(self, run: Run | int) -> bool:
        """Runs the last stage of a failed or quarantined task again; returns whether it changes."""
        return await self._change(run, Verb.RECOVER)

    async def _change(self, run: Run | int, verb: Verb) -> bool:
        platform = await self._open()
        changed = platform.tasks.change(platform.tasks.get(id_of(run)), verb)
        platform.note_change()
        await self.settle()
        return changed

    async def lose_worker(self) -> None:
        """The worker dies now: its handlers end without a result, and its leases run out.

        Another worker with the same handlers takes its place. A step of a lease's length (by
        default 300 seconds) ends the attempts.
        """
        (await self._open()).lose_worker()

    async def cut_off_worker(self) -> None:
        """The worker is cut off now: its handlers go on, and nothing of it arrives.

        Another worker with the same handlers takes its place.
        """
        (await self._open()).cut_off_worker()

    async def reconnect_worker(self) -> None:
        """Workers that were cut off are back: their results arrive, perhaps late."""
        (await self._open()).reconnect_workers()
        await self.settle()

    async def get(self, task_id: int) -> Run:
        """A task.

        Raises:
            NotFound: no task has this id.
        """
        (await self._open()).tasks.get(task_id)
        return self._run_of(task_id)

    async def until(self, run: AnyRun, condition: Callable[[AnyRun], object]) -> None:
        """Runs a task or flow until a condition holds; the clock moves as with `run`.

        Raises:
            NoEnd: it cannot hold any more: nothing is due, a stage has no handler, or a task has
                had 1,000 attempts.
        """
        platform = await self._open()
        row = platform.tasks.rows.get(run.id)
        root_id = run.id if row is None or row.flow is None else row.flow.root_id
        if not await self._driver.proceed(root_id, lambda: bool(condition(run))):
            raise NoEnd(f"nothing more happens to {run!r}, and the condition does not hold")

    def _run_of(self, task_id: int, *, created: bool = True) -> Run:
        records = self._platform.records
        return Run(task_id, self._platform.get, self._attempts_of, records.of_task, created=created)

    def tasks_of(self, run: FlowRun, node: str | None = None) -> Sequence[Run]:
        """The tasks of a flow, or of one of its nodes, in the order in which they were created."""
        return [self._run_of(row.id) for row in self._platform.tasks.of_flow(run.id, node)]

    def _attempts_of(self, task: Task) -> Sequence[Attempt]:
        platform = self._platform
        platform.records.collect()
        found = []
        for raw in task.attempts:
            attempt_id = AttemptId(task.id, raw["step"], raw["attempt"])
            started = platform.started.get(attempt_id)
            found.append(
                dataclasses.replace(
                    attempt_of(raw),
                    context=started.context.decode() if started is not None else None,
                    log=tuple(platform.records.lines.get(attempt_id, ())),
                    progress=tuple(platform.records.progress.get(attempt_id, ())),
                )
            )
        return found


def _steady(stage: Stage) -> Stage:
    """A stage whose own delays have no jitter."""
    if stage.backoff is None:
        return stage
    return dataclasses.replace(stage, backoff=dataclasses.replace(stage.backoff, jitter=0.0))
