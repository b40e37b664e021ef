"""The working copy of a decision: loaded rows, counters, and the actions so far."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from penstock.core.flow import fan_out, joins
from penstock.core.flow.messages import (
    Action,
    CancelLive,
    CancelNode,
    EndFlow,
    OpenItems,
    ReopenItems,
    SetLimit,
    Start,
)
from penstock.core.flow.plan import NodeKind, NodePlan, Plan, Policy
from penstock.core.flow.state import (
    UNSUCCESSFUL_NODES,
    FlowState,
    FlowStatus,
    Limit,
    NodeState,
    NodeStatus,
    StopReason,
)


class Working:
    """Rows that a decision may change. It never changes what the caller passed.

    Attributes:
        plan: the definition.
        flow: the flow's row.
        nodes: the loaded rows of nodes, by name.
        actions: what the owner must do, in order.
        visit: nodes with work in the rows of successors that are not loaded.
        visit_eligible: whether ready nodes and running maps that are not loaded have work.
        later: maps that open more items in a later transaction.
        maps: loaded maps whose items have changed, or which may open items.
    """

    def __init__(
        self,
        plan: Plan,
        flow: FlowState,
        nodes: Mapping[str, NodeState],
        now: datetime,
    ) -> None:
        self.plan = plan
        self.flow = flow
        self.nodes = dict(nodes)
        self.actions: list[Action] = []
        self.visit: set[str] = set()
        self.visit_eligible = False
        self.later: set[str] = set()
        self.maps: set[str] = set()
        self._now = now
        self._ended: list[str] = []

    def is_current(self, name: str, generation: int) -> bool:
        """Whether a message of that generation is about the running node."""
        node = self.nodes[name]
        return node.status is NodeStatus.RUNNING and node.generation == generation

    def end(self, name: str, status: NodeStatus, *, case: str | None = None, reason: str = "") -> None:
        """Ends a node; `settle` passes it on to its successors."""
        node = self.nodes[name]
        self.nodes[name] = node._replace(status=status, case=case, reason=reason)
        self.flow = self.flow._replace(
            live=self.flow.live - (node.status is NodeStatus.RUNNING),
            unfinished=self.flow.unfinished - 1,
            unsuccessful=self.flow.unsuccessful + (status in UNSUCCESSFUL_NODES),
        )
        if status in (NodeStatus.FAILED, NodeStatus.CANCELLED) and self.plan.on_failure is Policy.STOP:
            self.stop(StopReason.FAILURE)
        self._ended.append(name)

    def stop(self, reason: StopReason) -> None:
        """Starts nothing more in this generation; a later reason replaces only a weaker one."""
        ranks = list(StopReason)
        if self.flow.stop is None or ranks.index(reason) > ranks.index(self.flow.stop):
            self.flow = self.flow._replace(stop=reason)
            if reason is not StopReason.FAILURE:
                self.actions.append(CancelLive())
            # A map without a live item would wait for an item that never opens.
            self.visit_eligible |= any(node.kind is NodeKind.MAP for node in self.plan.nodes.values())

    def time_out(self, name: str, limit: Limit) -> None:
        """Ends a running node by its limit: its child is cancelled, and its end decides."""
        node = self.nodes[name]
        self.nodes[name] = node._replace(timed_out=limit)
        self.actions.append(CancelNode(name, node.generation))
        self.touch_map(name)

    def touch_map(self, name: str) -> None:
        """Looks at a map in `settle`; no effect for other nodes."""
        if self.plan.nodes[name].kind is NodeKind.MAP:
            self.maps.add(name)

    def propagate(self, name: str) -> None:
        """Brings the end of a final node to its successors."""
        for successor in self.plan.successors[name]:
            if successor not in self.nodes:
                self.visit.add(name)
                continue
            if self.nodes[successor].status is NodeStatus.PENDING:
                self.bring(name, successor)
                self.evaluate_join(successor)

    def bring(self, source: str, name: str) -> None:
        """Sets the states of the edges from a final node to a pending one."""
        ended, node = self.nodes[source], self.nodes[name]
        arrived = {
            position: joins.edge_state(ended, edge) for position, edge in self.plan.edges_from(source, name)
        }
        self.nodes[name] = node._replace(edge_states={**node.edge_states, **arrived})

    def evaluate_join(self, name: str) -> None:
        """Moves a pending node as the states of its edges demand."""
        status = joins.evaluate(self.plan.nodes[name], self.nodes[name].edge_states)
        if status is NodeStatus.READY:
            self.nodes[name] = self.nodes[name]._replace(status=status)
        elif status is not NodeStatus.PENDING:
            self.end(name, status)

    def settle(self) -> None:
        """Ends what can end, starts what may start, and ends the flow when all is done."""
        started = True
        while started:
            self._end_all()
            started = self.flow.may_start and self._start_all()
        self._finish()

    def set_limits(self, name: str | None, seconds: Mapping[Limit, float | None]) -> None:
        """Asks for a report when a limit of a node, or of the flow, is reached."""
        generation = self.flow.generation if name is None else self.nodes[name].generation
        for limit, after_s in seconds.items():
            if after_s is not None:
                at = self._now + timedelta(seconds=after_s)
                self.actions.append(SetLimit(name, generation, limit, at))

    def set_flow_limits(self) -> None:
        """Asks for reports about the limits of the flow's generation."""
        limits = {Limit.TIMEOUT: self.plan.timeout_s, Limit.WARN_AFTER: self.plan.warn_after_s}
        self.set_limits(None, limits)

    def _end_all(self) -> None:
        while self._ended or self.maps:
            while self._ended:
                self.propagate(self._ended.pop())
            for name in sorted(self.maps):
                self._conclude(name)
            if not self._ended:
                return

    def _conclude(self, name: str) -> None:
        plan, node = self.plan.nodes[name], self.nodes[name]
        if node.status is not NodeStatus.RUNNING or node.items is None:
            self.maps.discard(name)
            return
        status = fan_out.conclude(plan, node, self.flow.stop)
        if status is not None:
            self.maps.discard(name)
            self.end(name, status, reason=_map_reason(self.plan.nodes[name], node, status))
        elif fan_out.is_enough(plan, node.items) and not node.items.enough:
            self.nodes[name] = node._replace(items=node.items._replace(enough=True))
            self.actions.append(CancelNode(name, node.generation))

    def _start_all(self) -> bool:
        # Loaded nodes are few, while a definition may have a thousand.
        ready = [name for name, node in self.nodes.items() if node.status is NodeStatus.READY]
        if not ready and not self.maps:
            return False
        ready.sort(key=self.plan.positions.__getitem__)
        for name in ready:
            self._start(name)
        for name in sorted(self.maps):
            self._open(name)
        self.maps.clear()
        # A map that starts may end at once: it may have recovered without hope.
        self.maps.update(name for name in ready if self.nodes[name].items is not None)
        return bool(ready)

    def _start(self, name: str) -> None:
        node, plan = self.nodes[name], self.plan.nodes[name]
        self.flow = self.flow._replace(live=self.flow.live + 1)
        generation = self.flow.generation
        self.nodes[name] = node._replace(status=NodeStatus.RUNNING, generation=generation, recovers=False)
        if node.items is None:
            # The list of a map that is recovered is stored already.
            self.actions.append(Start(name, generation, plan.kind, recovers=node.recovers))
        if plan.has_limits:
            limits = {
                Limit.START_WITHIN: plan.start_within_s,
                Limit.FINISH_WITHIN: plan.finish_within_s,
                Limit.WARN_AFTER: plan.warn_after_s,
            }
            self.set_limits(name, limits)

    def _open(self, name: str) -> None:
        node = self.nodes[name]
        if node.status is not NodeStatus.RUNNING:
            return
        opened = fan_out.window(self.plan.nodes[name], node)
        if opened is None or node.items is None:
            return
        self.nodes[name] = node._replace(items=opened.items)
        if opened.reopen:
            self.actions.append(ReopenItems(name, node.generation, opened.reopen))
        if opened.open:
            self.actions.append(OpenItems(name, node.generation, node.items.opened, opened.open))
        if opened.is_cut:
            self.later.add(name)

    def _finish(self) -> None:
        status = self._final_status()
        if status is not None and self.flow.status is FlowStatus.RUNNING:
            # A pause ends with the flow: a recovery would otherwise start nothing.
            self.flow = self.flow._replace(status=status, paused=False)
            self.actions.append(EndFlow(status))

    def _final_status(self) -> FlowStatus | None:
        if self.flow.live:
            return None
        if not self.flow.unfinished and not self.flow.unsuccessful:
            # The cancellation, or the limit, came too late to change anything.
            return FlowStatus.SUCCEEDED
        if self.flow.stop is StopReason.CANCEL:
            return FlowStatus.CANCELLED
        if self.flow.stop is not None or not self.flow.unfinished:
            return FlowStatus.FAILED
        return None


def _map_reason(plan: NodePlan, node: NodeState, status: NodeStatus) -> str:
    """The reason of a map that ends, with that of the first item that could not start."""
    items = node.items
    if status is NodeStatus.SUCCEEDED or items is None:
        return node.reason
    if node.timed_out is not None:
        reason = f"{node.timed_out}_s is over"
    elif plan.k is not None and items.total < plan.k:
        reason = f"k is {plan.k:,}, and the list has {items.total:,}"
    else:
        reason = f"{items.unsuccessful:,} of {items.total:,} items did not succeed"
    return f"{reason}; {node.reason}" if node.reason else reason
