"""Runs of flows, as tests look at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.client.flow_models import Flow
from penstock.core.flow.state import FlowStatus
from penstock.errors import NotSucceeded
from penstock.testing.models import Run


class FlowRun:
    """A flow that was started, as it is now: each attribute is read when it is asked for.

    Tests receive it from `Pipeline` or `Deployment`.
    """

    def __init__(self, flow_id: int, read: Callable[[int], Flow], *, created: bool = True) -> None:
        self._id = flow_id
        self._read = read
        self._created = created

    @property
    def id(self) -> int:
        """Flow id."""
        return self._id

    @property
    def created(self) -> bool:
        """False when an earlier start with the same idempotency key created the flow."""
        return self._created

    @property
    def flow(self) -> Flow:
        """The flow, as `Client.get_flow` returns it."""
        return self._read(self._id)

    @property
    def name(self) -> str:
        """Name of its definition."""
        return self.flow.name

    @property
    def status(self) -> FlowStatus:
        """State of the flow."""
        return self.flow.status

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.flow.ended

    @property
    def error(self) -> str | None:
        """Why it failed; None without a reason."""
        return self.flow.error

    @property
    def nodes(self) -> dict[str, str]:
        """The states of its nodes, by name, in the order of the definition."""
        return {node["name"]: node["status"] for node in self.flow.nodes}

    def node(self, name: str) -> Mapping[str, Any]:
        """One node: a `FlowNode` document of the API's description.

        Raises:
            KeyError: there is no such node.
        """
        return {node["name"]: node for node in self.flow.nodes}[name]

    @property
    def output(self) -> Any:
        """The output of the flow.

        Raises:
            NotSucceeded: the flow has not succeeded; the message has its state, its nodes and the
                error.
        """
        flow = self.flow
        if flow.status is not FlowStatus.SUCCEEDED:
            raise NotSucceeded(_told(flow), flow.id, flow.status)
        return flow.output

    def __repr__(self) -> str:
        flow = self.flow
        error = f", {flow.error}" if flow.error is not None else ""
        return f"<FlowRun {flow.name} {flow.id}: {flow.status}{error}>"


AnyRun = TypeVar("AnyRun", Run, FlowRun)


def _told(flow: Flow) -> str:
    told = f"flow {flow.id} ({flow.name}) is {flow.status}"
    if flow.error is not None:
        told += f": {flow.error}"
    nodes = "".join(
        f"\n  {node['name']}: {node['status']}" + (f" ({node['reason']})" if node["reason"] else "")
        for node in flow.nodes
    )
    return f"{told}{nodes}"
