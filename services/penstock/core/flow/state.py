"""The state of a flow as PostgreSQL stores it: one row per flow and node.

A decision needs the rows of the nodes that it touches and of their successors. Everything else is
in the counters of the flow and in the edge states of each node. So a flow with a fan-out over
100,000 items is advanced without reading its items.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class FlowStatus(StrEnum):
    """The state of a flow. A flow that is paused or being cancelled is still `RUNNING`."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ShownStatus(StrEnum):
    """The states by which flows are listed. A flow that is paused or cancelling is also running."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StopReason(StrEnum):
    """Why a flow starts nothing more, while what runs goes on to its end."""

    FAILURE = "failure"
    TIMEOUT = "timeout"
    CANCEL = "cancel"


class NodeStatus(StrEnum):
    """The state of a node.

    `READY` nodes may start as soon as their flow may start anything. `SKIPPED` nodes are on a
    branch that a switch did not take. `BLOCKED` nodes depend on a node that failed.
    """

    PENDING = "pending"
    READY = "ready"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    BLOCKED = "blocked"


# A node in one of these states changes only by a recovery.
FINAL_NODES = frozenset(NodeStatus) - {NodeStatus.PENDING, NodeStatus.READY, NodeStatus.RUNNING}
# Each of these makes its flow fail, and a recovery runs it again.
UNSUCCESSFUL_NODES = frozenset({NodeStatus.FAILED, NodeStatus.CANCELLED, NodeStatus.BLOCKED})


class EdgeState(StrEnum):
    """How the source of an edge has ended, for the node behind it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DEAD = "dead"


class Outcome(StrEnum):
    """How the child of a node or of an item ended; also the states of an item that has ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Limit(StrEnum):
    """The limits of a node or of a flow."""

    START_WITHIN = "start_within"
    FINISH_WITHIN = "finish_within"
    WARN_AFTER = "warn_after"
    TIMEOUT = "timeout"


class Items(NamedTuple):
    """The counters of a map's items; the items themselves are rows.

    Attributes:
        total: items of the list.
        opened: the cursor: items 0 to `opened` - 1 have a row.
        succeeded: items whose child succeeded.
        unsuccessful: items whose child failed or was cancelled, in the map's generation.
        retry: items that ended without success in an earlier generation and wait to be reopened.
        enough: whether `k` items have succeeded, and the rest is being cancelled.
    """

    total: int = 0
    opened: int = 0
    succeeded: int = 0
    unsuccessful: int = 0
    retry: int = 0
    enough: bool = False

    @property
    def live(self) -> int:
        """Items with a live child."""
        return self.opened - self.succeeded - self.unsuccessful - self.retry


class NodeState(NamedTuple):
    """The row of a node.

    Attributes:
        status: its state.
        generation: the generation of the flow in which it last started.
        edge_states: states of its edges whose sources have ended, by position; a set, so that an
            end that is applied twice counts once.
        case: the case that a switch has chosen.
        timed_out: the limit that ended it.
        recovers: whether its next start continues its child flow, or its items, in place.
        items: the counters of a map.
        reason: why it failed, for people.
    """

    status: NodeStatus = NodeStatus.PENDING
    generation: int = 0
    edge_states: Mapping[int, EdgeState] = MappingProxyType({})
    case: str | None = None
    timed_out: Limit | None = None
    recovers: bool = False
    items: Items | None = None
    reason: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the node has ended in this generation."""
        return self.status in FINAL_NODES


class FlowState(NamedTuple):
    """The row of a flow.

    Attributes:
        status: its state.
        generation: 0, and one more with each recovery.
        paused: whether nothing may start until it is resumed.
        stop: why nothing may start any more in this generation.
        unfinished: nodes that are not final.
        live: nodes in state `RUNNING`.
        unsuccessful: nodes that failed, were cancelled or are blocked.
    """

    unfinished: int
    status: FlowStatus = FlowStatus.RUNNING
    generation: int = 0
    paused: bool = False
    stop: StopReason | None = None
    live: int = 0
    unsuccessful: int = 0

    @property
    def may_start(self) -> bool:
        """Whether nodes and items may start."""
        return self.status is FlowStatus.RUNNING and not self.paused and self.stop is None
