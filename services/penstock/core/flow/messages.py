"""The messages that a flow can receive, and the actions of its owner.

Messages are sets: `decide` gives the same state for one that is applied twice. Those of an
earlier generation change nothing. Only the end of an item counts anew in each decision, because the
items of a map are counters: its owner deletes the message in the transaction that applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from penstock.core.flow.plan import NodeKind
from penstock.core.flow.state import FlowStatus, Limit, Outcome


@dataclass(frozen=True, slots=True)
class Began:
    """The flow has been created; its roots start."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A node has ended: its task, child flow, wait or timer, or its expressions have failed.

    Attributes:
        node: its name.
        generation: the generation in which it was started.
        outcome: how it ended.
        reason: why it failed, for people.
    """

    node: str
    generation: int
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The conditions of a switch have been evaluated; `case` may be its `else`."""

    node: str
    generation: int
    case: str


@dataclass(frozen=True, slots=True)
class Listed:
    """The list of a map has been evaluated and stored; it has `total` items."""

    node: str
    generation: int
    total: int


@dataclass(frozen=True, slots=True)
class ItemEnded:
    """The child of one item has ended; `generation` is that in which the item was opened."""

    node: str
    index: int
    generation: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class LimitReached:
    """The time of a limit has come; `node` is None for a limit of the flow.

    The owner leaves out a `START_WITHIN` of a node whose task a worker has claimed.
    """

    node: str | None
    generation: int
    limit: Limit


@dataclass(frozen=True, slots=True)
class Visited:
    """Nodes are visited again, because an earlier decision asked for it (`Decision.visit`)."""

    node: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing may start until the flow is resumed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The flow may start nodes again."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The flow is to end, with everything under it."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The flow is to run again from its failed nodes, or from chosen ones.

    Attributes:
        generation: the flow's generation plus one, so that a repetition recovers once.
        nodes: the chosen nodes; none are all nodes that failed, were cancelled or are blocked.
        fresh: nodes that start from their beginning, not where they failed.
        in_place: whether the parent recovers its child flow. Only a parent may recover a child flow
            that has ended, because it has counted the end.
        version: of the definition that the flow has from then on; None is its own. The owner moves
            the flow first (`penstock.core.flow.change`).
        versions: with `version`: those of definitions below it that the flow has not pinned yet.
    """

    generation: int
    nodes: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    in_place: bool = False
    version: int | None = None
    versions: Mapping[str, int] = field(default_factory=dict, hash=False)


Message = (
    Began
    | Ended
    | Chosen
    | Listed
    | ItemEnded
    | LimitReached
    | Visited
    | Paused
    | Resumed
    | Cancelled
    | Recovered
)


@dataclass(frozen=True, slots=True)
class Start:
    """Start a node: insert its task or child flow, evaluate its conditions, or open its wait.

    The owner answers for a switch by `Chosen`, for a map by `Listed`, and for any node whose
    expressions fail by `Ended`.

    Attributes:
        node: its name.
        generation: the generation, which makes the child unique.
        kind: its kind.
        recovers: whether an existing child flow is recovered in place.
    """

    node: str
    generation: int
    kind: NodeKind
    recovers: bool = False


@dataclass(frozen=True, slots=True)
class OpenItems:
    """Start the children of `count` items of a map, from item `first` on."""

    node: str
    generation: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ReopenItems:
    """Start `count` items again that ended without success in an earlier generation.

    The owner chooses those with the lowest index, and gives them this generation.
    """

    node: str
    generation: int
    count: int


@dataclass(frozen=True, slots=True)
class CancelNode:
    """Cancel the child, or the live items, of a node."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class CancelLive:
    """Cancel every live child of the flow, in chunks; each still reports its end."""


@dataclass(frozen=True, slots=True)
class SetLimit:
    """Report `LimitReached` at a moment; `node` is None for a limit of the flow."""

    node: str | None
    generation: int
    limit: Limit
    at: datetime


@dataclass(frozen=True, slots=True)
class Warn:
    """Publish that a node, or with None the flow, takes longer than its definition expects."""

    node: str | None
    generation: int


@dataclass(frozen=True, slots=True)
class EndFlow:
    """The flow has ended: publish it, and report it to the parent."""

    status: FlowStatus


@dataclass(frozen=True, slots=True)
class Refuse:
    """A command has no effect.

    Attributes:
        code: `cancelling`, `timing_out`, `nothing_to_recover`, `node_running`, `unknown_node`,
            or `node_changed`.
        nodes: the nodes that are in the way.
    """

    code: str
    nodes: tuple[str, ...] = ()


Action = Start | OpenItems | ReopenItems | CancelNode | CancelLive | SetLimit | Warn | EndFlow | Refuse
