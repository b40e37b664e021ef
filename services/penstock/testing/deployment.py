"""A worker on a real deployment, with the methods of a pipeline that need no clock of their own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from penstock.client import Client
from penstock.client.flow_models import Flow
from penstock.client.models import Task, TaskFilter
from penstock.core.task import State
from penstock.errors import Conflict, PenstockError
from penstock.testing.exits import refusing_exits
from penstock.testing.flow_run import AnyRun, FlowRun
from penstock.testing.models import NoEnd, Run, attempt_of, id_of
from penstock.testing.type_settings import type_settings
from penstock.worker import Worker

# Seconds between two looks at a task.
_LOOK_S = 0.05
# The settings that lead a worker to a deployment.
_ADDRESSES = ("kafka", "prefix", "objects", "topics_file")


class Deployment:
    """Runs a worker in the test's process, on Kafka and PostgreSQL and with all services.

    It has the methods of `Pipeline`, but not those that move the clock or break the worker: time is
    real. So the same test runs on both. The task types are registered as by `Pipeline`.

    Args:
        worker: with its handlers; it runs with the addresses of the deployment.
        environment: variables that lead to the deployment: those of `penstock_environment`.
        types: settings of task types by name, before those of the worker's code.
        flows: definitions of flows, those of child flows first. A version never changes, so a test
            that needs another definition needs another name or version.
    """

    def __init__(
        self,
        worker: Worker,
        environment: Mapping[str, str],
        *,
        types: Mapping[str, Mapping[str, Any]] | None = None,
        flows: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        variables = {name: environment.get(f"PENSTOCK_{name.upper()}", "") for name in _ADDRESSES}
        given: dict[str, Any] = {name: value for name, value in variables.items() if value}
        registered = worker.registered
        settings = dataclasses.replace(registered.settings, worker_gateway="", **given)
        self._worker = worker.with_settings(settings)
        self._types = type_settings(registered, types or {})
        self._client = Client(environment["PENSTOCK_GATEWAY"])
        self._stack = AsyncExitStack()
        self._serving: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._definitions = list(flows)
        self._known: dict[int, Task] = {}
        self._known_flows: dict[int, Flow] = {}

    @property
    def client(self) -> Client:
        """A client of the deployment."""
        return self._client

    async def __aenter__(self) -> Self:
        self._stack.enter_context(refusing_exits(asyncio.get_running_loop()))
        await self._stack.enter_async_context(self._client)
        try:
            for name, settings in self._types.items():
                await self._client.register_type(name, **settings)
            for definition in self._definitions:
                await self._client.put_flow_definition(definition)
            await self._start()
        except BaseException:
            # Raised again: without this call, what has started would go on.
            await self.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _start(self) -> None:
        """Starts a worker, and waits until it serves."""
        self._stopping = asyncio.Event()
        serves = asyncio.Event()
        self._serving = asyncio.create_task(self._worker.serve(self._stopping, serves.set))
        waiting = asyncio.create_task(serves.wait())
        await asyncio.wait({self._serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._serving.done():
            self._serving.result()
            raise PenstockError("the worker ended before it served")

    async def close(self) -> None:
        """Cancels what was submitted and has not ended, and stops the worker."""
        try:
            if left := [task_id for task_id, task in self._known.items() if not task.ended]:
                await self._client.cancel(left)
            for flow_id, flow in self._known_flows.items():
                if not flow.ended:
                    with suppress(Conflict):
                        await self._client.cancel_flow(flow_id)
            if self._serving is not None:
                self._stopping.set()
                await self._serving
        finally:
            await self._stack.aclose()

    async def run(
        self,
        type: str,  # noqa: A002 (the platform's word for it)
        context: Any = None,
        **fields: Any,
    ) -> Run:
        """Submits a task, and waits until it ends.

        Args:
            type: task type.
            context: input of the first stage.
            fields: the other arguments of `Client.submit`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
        """
        run = await self.submit(type, context, **fields)
        await self.until(run, lambda run: run.ended)
        return run

    async def submit(
        self,
        type: str,  # noqa: A002 (the platform's word for it)
        context: Any = None,
        **fields: Any,
    ) -> Run:
        """Submits a task.

        Args:
            type: task type.
            context: input of the first stage.
            fields: the other arguments of `Client.submit`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
        """
        submitted = await self._client.submit(type, context, **fields)
        await self._look(submitted.id)
        return self._run_of(submitted.id, created=submitted.created)

    async def run_flow(self, flow: str, inputs: Mapping[str, Any] | None = None, **fields: Any) -> FlowRun:
        """Starts a flow, and waits until it ends.

        Args:
            flow: name of its definition.
            inputs: a JSON value for each declared input, by name.
            fields: the other arguments of `Client.submit_flow`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
        """
        run = await self.submit_flow(flow, inputs, **fields)
        await self.until(run, lambda run: run.ended)
        return run

    async def submit_flow(self, flow: str, inputs: Mapping[str, Any] | None = None, **fields: Any) -> FlowRun:
        """Starts a flow.

        Args:
            flow: name of its definition.
            inputs: a JSON value for each declared input, by name.
            fields: the other arguments of `Client.submit_flow`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
        """
        submitted = await self._client.submit_flow(flow, inputs, **fields)
        return await self._flow_of(submitted.id, created=submitted.created)

    async def send_event(
        self,
        name: str,
        data: Any = None,
        *,
        key: str = "",
        id: str | None = None,  # noqa: A002 (the platform's word for it)
    ) -> bool:
        """Sends an event, as `Client.send_event`; returns whether it is new."""
        return await self._client.send_event(name, data, key=key, id=id)

    async def pause_flow(self, run: FlowRun) -> None:
        """Pauses a flow: nothing new starts, and what runs goes on to its end."""
        await self._client.pause_flow(run.id)

    async def resume_flow(self, run: FlowRun) -> None:
        """Resumes a flow."""
        await self._client.resume_flow(run.id)

    async def cancel_flow(self, run: FlowRun) -> None:
        """Cancels a flow: it ends when nothing in it is live."""
        await self._client.cancel_flow(run.id)

    async def recover_flow(self, run: FlowRun, nodes: Iterable[str] = ()) -> Sequence[str]:
        """Runs failed or chosen nodes again, and those behind them; returns all that run again.

        Raises:
            RecoveryRefused: nothing can be recovered now.
        """
        answer = await self._client.recover_flow(run.id, nodes=list(nodes))
        while run.flow.generation < answer["generation"]:
            await asyncio.sleep(_LOOK_S)
            await self._read(run)
        return list(answer["nodes"])

    async def get_flow(self, flow_id: int) -> FlowRun:
        """A flow.

        Raises:
            NotFound: no flow has this id.
        """
        return await self._flow_of(flow_id)

    async def _flow_of(self, flow_id: int, *, created: bool = True) -> FlowRun:
        self._known_flows[flow_id] = await self._client.get_flow(flow_id)
        return FlowRun(flow_id, self._known_flows.__getitem__, created=created)

    async def until(self, run: AnyRun, condition: Callable[[AnyRun], object]) -> None:
        """Waits until a condition on a task or flow holds; it is read again and again.

        Raises:
            NoEnd: the task or flow has ended, and the condition does not hold.
        """
        while True:
            await self._read(run)
            if condition(run):
                return
            if run.ended:
                raise NoEnd(f"nothing more happens to {run!r}, and the condition does not hold")
            if self._serving is not None and self._serving.done():
                self._serving.result()
                raise PenstockError("the worker has ended")
            await asyncio.sleep(_LOOK_S)

    async def _read(self, run: Run | FlowRun) -> None:
        if isinstance(run, FlowRun):
            self._known_flows[run.id] = await self._client.get_flow(run.id)
        else:
            await self._look(run.id)

    async def cancel(self, run: Run | int) -> bool:
        """Cancels a task; its handler is cancelled as well. Returns whether this call did it.

        Raises:
            NotFound: no task has this id.
            Conflict: it has ended otherwise.
        """
        task_id = id_of(run)
        cancelled = await self._client.cancel([task_id])
        await self._look(task_id)
        state = self._known[task_id].state
        if state is not State.CANCELLED:
            raise Conflict(f"task {task_id} has already {state}: it can no longer be cancelled")
        return bool(cancelled.cancelled)

    async def pause(self, run: Run | int) -> bool:
        """Pauses a task, if running at the end of its stage; returns whether it changes."""
        return await self._operate("pause", run)

    async def resume(self, run: Run | int) -> bool:
        """Resumes a paused task; returns whether it changes."""
        return await self._operate("resume", run)

    async def recover(self, run: Run | int) -> bool:
        """Runs the last stage of a failed or quarantined task again; returns whether it changes."""
        return await self._operate("recover", run)

    async def _operate(self, verb: str, run: Run | int) -> bool:
        operated = await self._client.operate(verb, TaskFilter(ids=[id_of(run)]))
        await self._look(id_of(run))
        return operated.count > 0

    async def get(self, task_id: int) -> Run:
        """A task.

        Raises:
            NotFound: no task has this id.
        """
        await self._look(task_id)
        return self._run_of(task_id)

    async def _look(self, task_id: int) -> None:
        self._known[task_id] = await self._client.get(task_id)

    def _run_of(self, task_id: int, *, created: bool = True) -> Run:
        return Run(
            task_id,
            self._known.__getitem__,
            lambda task: [attempt_of(raw) for raw in task.attempts],
            created=created,
        )
