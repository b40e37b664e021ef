"""The methods of a pipeline about flows."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson

from penstock.client.flow_submission import FlowDraft
from penstock.testing.driver import Driver
from penstock.testing.flow_run import FlowRun
from penstock.testing.platform import Platform


class FlowMethods(ABC):
    """The methods about flows."""

    _driver: Driver

    @abstractmethod
    async def _open(self) -> Platform:
        """The platform, with the types of the pipeline."""

    async def run_flow(self, flow: str, inputs: Mapping[str, Any] | None = None, **fields: Any) -> FlowRun:
        """Starts a flow, and runs it until it ends.

        The clock moves as with `run`. A flow that waits for an event without a limit, or is paused,
        does not end: the call returns when nothing more is due.

        Args:
            flow: name of its definition.
            inputs: a JSON value for each declared input, by name.
            fields: the other arguments of `Client.submit_flow`, and `schedule` and `tick`, with
                which the flow starts as a schedule starts it.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
            NoEnd: a stage has no handler, or a task has had 1,000 attempts.
        """
        run = await self._start(flow, inputs, fields)
        await self._driver.proceed(run.id, lambda: run.ended)
        return run

    async def submit_flow(self, flow: str, inputs: Mapping[str, Any] | None = None, **fields: Any) -> FlowRun:
        """Starts a flow, and runs what can run now; the clock stands still.

        Args:
            flow: name of its definition.
            inputs: a JSON value for each declared input, by name.
            fields: as of `run_flow`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
        """
        run = await self._start(flow, inputs, fields)
        await self._driver.settle()
        return run

    async def _start(self, flow: str, inputs: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> FlowRun:
        given = dict(fields)
        tick: datetime | None = given.pop("tick", None)
        schedule: str | None = given.pop("schedule", None if tick is None else "test")
        draft = FlowDraft(flow=flow, inputs=inputs or {}, **given)
        platform = await self._open()
        raw = orjson.loads(orjson.dumps(draft.to_wire()))
        started = platform.flows.start(raw, schedule, tick)
        platform.note_change()
        return FlowRun(started.id, platform.flows.get, created=started.created)

    async def send_event(
        self,
        name: str,
        data: Any = None,
        *,
        key: str = "",
        id: str | None = None,  # noqa: A002 (the platform's word for it)
    ) -> bool:
        """Sends an event to the flows and tasks that wait for it, and runs what can run now.

        An event may come before its wait, as much as 24 hours. The arguments are those of
        `Client.send_event`.

        Returns:
            Whether the event is new.

        Raises:
            Invalid: the event is refused; `pointer` is the field at fault.
        """
        platform = await self._open()
        event = {"event": name, "id": f"auto-{uuid.uuid4().hex}" if id is None else id, "key": key}
        if data is not None:
            event["data"] = data
        created = platform.flows.send_event(orjson.loads(orjson.dumps(event)))
        platform.note_change()
        await self._driver.settle()
        return created

    async def pause_flow(self, run: FlowRun) -> None:
        """Pauses a flow: nothing new starts, and what runs goes on to its end.

        Raises:
            Conflict: it has ended.
        """
        await self._command(run, "pause")

    async def resume_flow(self, run: FlowRun) -> None:
        """Resumes a flow.

        Raises:
            Conflict: it has ended.
        """
        await self._command(run, "resume")

    async def cancel_flow(self, run: FlowRun) -> None:
        """Cancels a flow: it ends when nothing in it is live.

        Raises:
            Conflict: it has ended otherwise.
        """
        await self._command(run, "cancel")

    async def recover_flow(self, run: FlowRun, nodes: Iterable[str] = ()) -> Sequence[str]:
        """Runs failed or chosen nodes again, and those behind them; returns all that run again.

        Raises:
            RecoveryRefused: nothing can be recovered now.
        """
        platform = await self._open()
        again = platform.flows.recover(run.id, list(nodes))
        platform.note_change()
        await self._driver.settle()
        return again

    async def get_flow(self, flow_id: int) -> FlowRun:
        """A flow.

        Raises:
            NotFound: no flow has this id.
        """
        platform = await self._open()
        platform.flows.get(flow_id)
        return FlowRun(flow_id, platform.flows.get)

    async def _command(self, run: FlowRun, kind: str) -> None:
        platform = await self._open()
        platform.flows.command(run.id, kind)
        platform.note_change()
        await self._driver.settle()
