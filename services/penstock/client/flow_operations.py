"""Methods of `Client` that show and steer flows."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Protocol
from urllib.parse import quote

import orjson

from penstock.client.arguments import encode_moment
from penstock.client.flow_models import Flow, FlowFilter
from penstock.client.models import Operated, Submitted
from penstock.client.operations import follow_operation, local_user
from penstock.client.transport import Document, Transport, pages, query_of, without_none
from penstock.client.waits import EndPolls
from penstock.core.flow.state import FlowStatus
from penstock.errors import NotSucceeded

FLOW_PAGE_SIZE = 500


class _Rerunner(Transport, Protocol):
    """The parts of `Client` that a rerun uses."""

    _read_output: Callable[..., Any]


class FlowOperationMethods:
    """The methods of `Client` for running and ended flows."""

    async def get_flow(self: Transport, flow_id: int, *, definition: bool = False) -> Flow:
        """One flow with its nodes, inputs and output.

        Args:
            flow_id: the flow.
            definition: whether `raw` has the definition too.

        Raises:
            NotFound: no flow has this id.
        """
        query = [("definition", "true")] if definition else []
        return Flow.from_wire(await self._request("GET", f"/flows/{flow_id}", query=query))

    async def list_flows(
        self: Transport,
        *,
        name: str | None = None,
        status: str | Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        since: datetime | None = None,
        family: int | None = None,
        schedule: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Flow]:
        """Flows that match all filters, newest first.

        Args:
            name: name of the definition.
            status: one status or several, also `paused` and `cancelling`, which are running.
            labels: labels that the flow has, with these values.
            idempotency_key: idempotency key of the start.
            since: flows that were started then or later; a naive moment is local time.
            family: instead of flows without a parent: this root flow and all flows below it.
            schedule: flows that this schedule has started, with those of backfills and reruns.
            limit: most flows; None is all.
        """
        query = query_of(
            name=name,
            idempotency_key=idempotency_key,
            since=encode_moment(since, "since"),
            family=family,
            schedule=schedule,
        )
        query += [("status", str(each)) for each in ([status] if isinstance(status, str) else status)]
        query += [("label", f"{label}:{value}") for label, value in (labels or {}).items()]
        async for document in pages(self, "/flows", "flows", query, limit, FLOW_PAGE_SIZE):
            yield Flow.from_wire(document)

    async def flow_node(self: Transport, flow_id: int, node: str) -> Document:
        """One node with its output and its earlier generations: a `FlowNodeDetail` document.

        Raises:
            NotFound: there is no such flow, or it has no such node.
        """
        path = f"/flows/{flow_id}/nodes/{quote(node, safe='')}"
        answer = await self._request("GET", path, query=[("limit", "1")])
        found: Document = answer["node"]
        return found

    async def flow_children(
        self: Transport, flow_id: int, node: str, *, state: str | Sequence[str] = (), limit: int | None = None
    ) -> AsyncIterator[Document]:
        """The tasks or child flows of a node, by item: one `FlowChild` document each.

        Args:
            flow_id: the flow.
            node: name of the node.
            state: one state or several, of tasks or of flows.
            limit: most tasks or child flows; None is all.

        Raises:
            NotFound: there is no such flow, or it has no such node.
        """
        path = f"/flows/{flow_id}/nodes/{quote(node, safe='')}"
        query = [("state", str(each)) for each in ([state] if isinstance(state, str) else state)]
        async for document in pages(self, path, "children", query, limit, FLOW_PAGE_SIZE):
            yield document

    async def why_flow(self: Transport, flow_id: int) -> Document:
        """Why a flow has not ended, or why it failed: one `FlowWhy` document.

        Raises:
            NotFound: no flow has this id.
        """
        return await self._request("GET", f"/flows/{flow_id}/why")

    async def pause_flow(self: Transport, flow_id: int) -> Document:
        """Starts nothing new in a flow and its child flows; returns a `FlowCommanded` document.

        Raises:
            NotFound: no flow has this id.
            Conflict: the flow has ended.
        """
        return await self._request("POST", f"/flows/{flow_id}/pause")

    async def resume_flow(self: Transport, flow_id: int) -> Document:
        """Resumes a flow and its child flows; arguments, result and errors as of `pause_flow`."""
        return await self._request("POST", f"/flows/{flow_id}/resume")

    async def cancel_flow(self: Transport, flow_id: int) -> Document:
        """Cancels a flow and everything in it; arguments, result and errors as of `pause_flow`."""
        return await self._request("POST", f"/flows/{flow_id}/cancel")

    async def recover_flow(
        self: Transport,
        flow_id: int,
        nodes: Iterable[str] = (),
        *,
        version: int | Literal["same", "latest"] = "same",
        dry_run: bool = False,
    ) -> Document:
        """Runs failed or chosen nodes again, and all nodes behind them.

        Args:
            flow_id: the flow.
            nodes: the chosen nodes; none are all that failed.
            version: of the definition from then on: that of the flow, the newest, or another one.
                Each node that is carried must be the same there.
            dry_run: only return which nodes would run again.

        Returns:
            a `FlowCommanded` document with the nodes that run again.

        Raises:
            NotFound: no flow has this id.
            RecoveryRefused: the flow cannot be recovered now; it has a code and nodes.
            Invalid: there is no such version, or it refuses the inputs.
        """
        body = without_none(
            nodes=list(nodes) or None, version=None if version == "same" else version, dry_run=dry_run or None
        )
        # A repetition of a recovery that has begun is refused or begins another one.
        return await self._request("POST", f"/flows/{flow_id}/recover", orjson.dumps(body), safe=dry_run)

    async def rerun_flow(
        self: _Rerunner,
        flow_id: int,
        *,
        version: int | Literal["same", "latest"] = "same",
        idempotency_key: str | None = None,
    ) -> Submitted:
        """Starts a new flow with the inputs of a flow, from its beginning.

        Args:
            flow_id: the flow that is repeated.
            version: of the definition: that of the flow, the newest, or another one.
            idempotency_key: a second call with the same key returns the first flow; None is a
                random one.

        Raises:
            NotFound: no flow has this id.
            Invalid: there is no such version, or it refuses the inputs.
        """
        body = {"version": version, "idempotency_key": idempotency_key or f"auto-{uuid.uuid4().hex}"}
        answer = await self._request("POST", f"/flows/{flow_id}/rerun", orjson.dumps(body))
        return Submitted(
            answer["id"],
            created=idempotency_key is None or answer["created"],
            read_result=self._read_output,
        )

    async def operate_flows(
        self: Transport,
        verb: str,
        which: FlowFilter,
        *,
        version: Literal["same", "latest"] | None = None,
        rate: float | None = None,
        by: str | None = None,
        id: str | None = None,  # noqa: A002 (the platform's word for it)
        dry_run: bool = False,
        wait: bool = True,
        progress: Callable[[int], None] | None = None,
        begun: Callable[[str], None] | None = None,
    ) -> Operated:
        """Pauses, resumes, cancels, recovers or reruns flows, and waits until all have the command.

        Args:
            verb: pause, resume, cancel, recover or rerun.
            which: filter of the flows.
            version: of rerun: the version of each flow, which is the default, or the newest.
            rate: most flows a second; None is no limit.
            by: as of `operate`, like all further arguments and errors.
            id: see there.
            dry_run: see there.
            wait: see there.
            progress: see there.
            begun: see there.
        """
        wire = without_none(
            id=None if dry_run else id or uuid.uuid4().hex,
            verb=str(verb),
            filter=which.to_wire(),
            by=by or local_user(),
            version=version,
            rate=rate,
            dry_run=dry_run or None,
        )
        operation = await self._request("POST", "/flows/operations", orjson.dumps(wire))
        return await follow_operation(self, operation, wait=wait, progress=progress, begun=begun)

    async def watch_flow(
        self: Transport, flow_id: int, *, generation: int = 0, every_s: float = 1.0
    ) -> AsyncIterator[Flow]:
        """Yields a flow at once and after each change of it or of its nodes, until it has ended.

        Args:
            flow_id: the flow.
            generation: that of the answer to `recover_flow`: an end before it does not count.
            every_s: longest time between two polls, in seconds. The end of the flow is noticed
                when it happens.

        Raises:
            NotFound: no flow has this id.
        """
        polls = EndPolls(every_s, int(every_s))
        last: Flow | None = None
        while True:
            path = f"/flows/{flow_id}"
            flow = Flow.from_wire(await self._request("GET", path, wait_s=polls.wait_s))
            if flow != last:
                yield flow
                last = flow
            if flow.ended and flow.generation >= generation:
                return
            await polls.pause()

    async def wait_for_flow(
        self: Transport, flow_id: int, *, generation: int = 0, timeout_s: float | None = None
    ) -> Flow:
        """Waits until a flow has ended, and returns it; `generation` as of `watch_flow`.

        Raises:
            NotFound: no flow has this id.
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        flow: Flow | None = None
        async with asyncio.timeout(timeout_s):
            flows = FlowOperationMethods.watch_flow(self, flow_id, generation=generation)
            async for flow in flows:  # noqa: B007 (the last one is the answer)
                pass
        assert flow is not None
        return flow

    async def flow_output(self: Transport, flow_id: int, *, timeout_s: float | None = None) -> Any:
        """Waits until a flow has succeeded, and returns its output.

        Raises:
            NotFound: no flow has this id.
            NotSucceeded: it has ended in another state; the message has its error.
            TimeoutError: it has not ended within `timeout_s` seconds.
        """
        flow = await FlowOperationMethods.wait_for_flow(self, flow_id, timeout_s=timeout_s)
        if flow.status is not FlowStatus.SUCCEEDED:
            why = f": {flow.error}" if flow.error else ""
            raise NotSucceeded(f"flow {flow_id} is {flow.status}{why}", flow_id, flow.status)
        return flow.output
