"""Maps: a window of live items, opened in chunks by a cursor, and the end of the map.

The list is known before the first item opens, so a map cannot end early: the total is fixed, and a
map ends when no item is live and none may open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.flow.plan import NodePlan
from penstock.core.flow.state import Items, NodeState, NodeStatus, Outcome, StopReason

# Items that one decision opens. More tasks in one transaction of the owner would take over 100 ms.
CHUNK = 500
# Items that the first decision of a map opens, so that workers can begin at once.
FIRST_CHUNK = 200


@dataclass(frozen=True, slots=True)
class Window:
    """Items to open now.

    Attributes:
        items: the counters after that.
        reopen: items of earlier generations to start again.
        open: items behind the cursor to start.
        is_cut: whether `CHUNK` cut the window, and the rest opens in a later decision.
    """

    items: Items
    reopen: int
    open: int
    is_cut: bool


def count_ends(items: Items, ended: Mapping[Outcome, int]) -> Items:
    """The counters after the end of live items, counted by outcome."""
    succeeded = ended.get(Outcome.SUCCEEDED, 0)
    return items._replace(
        succeeded=items.succeeded + succeeded,
        unsuccessful=items.unsuccessful + sum(ended.values()) - succeeded,
    )


def is_enough(plan: NodePlan, items: Items) -> bool:
    """Whether the `k` items that the map needs have succeeded."""
    return plan.k is not None and items.succeeded >= plan.k


def cannot_succeed(plan: NodePlan, items: Items) -> bool:
    """Whether the map will fail even if all its other items succeed."""
    if plan.k is None:
        return items.unsuccessful > plan.tolerate
    return items.total - items.unsuccessful < plan.k


def conclude(plan: NodePlan, node: NodeState, stop: StopReason | None) -> NodeStatus | None:
    """The state in which a running map ends now; None while it must go on.

    Args:
        plan: the map.
        node: its state.
        stop: why nothing may open any more in this flow and generation.
    """
    items = node.items
    if items is None or items.live:
        return None
    all_opened = items.opened == items.total and not items.retry
    if is_enough(plan, items) or (plan.k is None and all_opened and not items.unsuccessful):
        return NodeStatus.SUCCEEDED
    # Items that were cancelled with their map are not among those that it tolerates: a recovery
    # would carry them as done.
    if node.timed_out is None and stop in (StopReason.CANCEL, StopReason.TIMEOUT):
        return NodeStatus.CANCELLED
    if node.timed_out is not None or cannot_succeed(plan, items):
        return NodeStatus.FAILED
    if all_opened:
        return NodeStatus.SUCCEEDED
    return None if stop is None else NodeStatus.CANCELLED


def window(plan: NodePlan, node: NodeState) -> Window | None:
    """The items that a running map opens now; None when it opens none.

    The caller has found that the flow may start items.
    """
    items = node.items
    if items is None or node.timed_out is not None:
        return None
    if is_enough(plan, items) or cannot_succeed(plan, items):
        return None
    room = plan.parallel - items.live
    wanted = max(0, min(room, items.retry + items.total - items.opened))
    if not wanted:
        return None
    now = min(wanted, CHUNK if items.opened else FIRST_CHUNK)
    reopen = min(now, items.retry)
    opened = now - reopen
    after = items._replace(retry=items.retry - reopen, opened=items.opened + opened)
    return Window(after, reopen, opened, is_cut=now < wanted)
