"""The order of release for types with ageing or `finish_first`. Pure; waiting time is an argument.

With ageing, a task rises one level each `ageing_s` seconds that it waits, up to HIGHEST. Within a
level the smaller id goes first. A LOWEST task that has waited `4 * ageing_s` is behind older tasks
only.
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
        waited_s: seconds since its submission.
        begun: it has entered a later stage.
    """

    id: int
    level: int
    waited_s: float
    begun: bool = False


def level_of(head: Head, ageing_s: float | None) -> int:
    """The effective level of a task; None for `ageing_s` turns ageing off."""
    if ageing_s is None:
        return head.level
    # A clock that stepped back gives negative waiting times.
    gained = max(0.0, head.waited_s) / ageing_s
    # Bounded before the conversion: a tiny `ageing_s` makes it infinite.
    return head.level - int(min(gained, head.level))


def first(heads: Iterable[Head], limit: int, ageing_s: float | None) -> dict[int, int]:
    """Selects the tasks that go first: tasks that have begun, then by effective level, then by id.

    Args:
        heads: the first `limit` tasks of each level, and of each level's tasks that have begun; a
            task may be in both.
        limit: most tasks.
        ageing_s: seconds a level; None turns ageing off.

    Returns:
        Effective levels by id, in order of release; tasks that have begun have HIGHEST (0). A
        stable sort by these levels keeps the order.
    """
    by_id = {head.id: head for head in sorted(heads, key=lambda head: head.begun)}
    order = sorted(by_id.values(), key=lambda head: (not head.begun, level_of(head, ageing_s), head.id))
    return {head.id: 0 if head.begun else level_of(head, ageing_s) for head in order[:limit]}
