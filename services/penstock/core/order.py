"""The order of release of types whose tasks age, or are finished before others begin. Pure; waiting time is an argument.

A task gains one level for each so many seconds that it has waited, up to HIGHEST; within a level the smaller id goes first. So
a task that has waited four times that long, or less at a higher level, is overtaken by nothing that was submitted after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Head:
    """One of the first tasks of a level.

    Attributes:
        id: task id.
        level: its priority; 0 is HIGHEST.
        waited_s: seconds since it was submitted.
        begun: it has entered a later stage.
    """

    id: int
    level: int
    waited_s: float
    begun: bool = False


def level_of(head: Head, ageing_s: float | None) -> int:
    """The level at which a task counts now; with None nothing ages."""
    if ageing_s is None:
        return head.level
    # A clock that was put back makes nobody younger than new.
    gained = max(0.0, head.waited_s) / ageing_s
    # Bounded first: of a tiny `ageing_s` it may be infinite.
    return head.level - int(min(gained, head.level))


def first(heads: Iterable[Head], limit: int, ageing_s: float | None) -> dict[int, int]:
    """What goes first, at most `limit` tasks: what has begun, then by level, then by id.

    Returns:
        In this order, by id: the level a task was chosen at, which is HIGHEST (0) for what has begun. Whoever orders
        released tasks by it, and tasks of one level as they come, keeps this order.

    Args:
        heads: the first `limit` of each level, and of what has begun of each; a task may be among both.
        limit: most tasks.
        ageing_s: seconds for a level.
    """
    known = {head.id: head for head in sorted(heads, key=lambda head: head.begun)}
    order = sorted(known.values(), key=lambda head: (not head.begun, level_of(head, ageing_s), head.id))
    return {head.id: 0 if head.begun else level_of(head, ageing_s) for head in order[:limit]}
