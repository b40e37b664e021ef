"""The order of release. Pure; waiting time is an argument.

A flow takes its place among tasks as one task would: its level is the priority of its root, and
within a level the smaller id goes first, that of the root flow or of a plain task. So child flows
share the place of their root. The tasks of one flow follow each other by their own priority, then
by id. The statements of `release.sql`, `limits.sql` and `why.sql` have this order, and so has the
index `task_release`.

With ageing, a task rises one level each `ageing_s` seconds that it waits, up to HIGHEST. A LOWEST
task that has waited `4 * ageing_s` is behind older tasks only. Tasks of a flow wait since the start
of its root, or a younger task of the flow would hide an older task of another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class SortKey(NamedTuple):
    """The place of a task among those of its level.

    Attributes:
        root_id: of its root flow; its own id for a task without a flow.
        priority: its own, which counts within the flow.
        id: its own.
    """

    root_id: int
    priority: int
    id: int


@dataclass(frozen=True, slots=True)
class Head:
    """One of the first tasks of a level.

    Attributes:
        place: its place in the level.
        level: priority of its root flow, or its own without a flow; 0 is HIGHEST.
        waited_s: seconds since its submission, or since the start of its root flow.
        begun: it has entered a later stage.
    """

    place: SortKey
    level: int
    waited_s: float
    begun: bool = False

    @property
    def id(self) -> int:
        """The task's id."""
        return self.place.id


def level_of(head: Head, ageing_s: float | None) -> int:
    """The effective level of a task; None for `ageing_s` turns ageing off."""
    if ageing_s is None:
        return head.level
    # A clock that stepped back gives negative waiting times.
    gained = max(0.0, head.waited_s) / ageing_s
    # Bounded before the conversion: a tiny `ageing_s` makes it infinite.
    return head.level - int(min(gained, head.level))


def first(heads: Iterable[Head], limit: int, ageing_s: float | None) -> dict[int, int]:
    """Selects the tasks that go first: tasks that have begun, by effective level, by place.

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
    order = sorted(by_id.values(), key=lambda head: (not head.begun, level_of(head, ageing_s), head.place))
    return {head.id: 0 if head.begun else level_of(head, ageing_s) for head in order[:limit]}
