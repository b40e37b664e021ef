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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


class Key(NamedTuple):
    """One key of the order.

    Attributes:
        name: of the key in the rows that statements return; none of their columns has this name.
        sql: the key of a row of `task`; `{t}` stands for the table's alias and its dot.
        sql_type: its type in SQL; values are whole numbers, none below 0.
        of: the key of a task whose attributes have the names of the columns.
    """

    name: str
    sql: str
    sql_type: str
    of: Callable[[Any], int]


# The first is the level, the last is the id.
KEYS = (
    Key(
        "level",
        "coalesce({t}flow_priority, {t}priority)",
        "smallint",
        lambda task: task.priority if task.flow_priority is None else task.flow_priority,
    ),
    Key(
        "root_id",
        "coalesce({t}flow_root_id, {t}id)",
        "bigint",
        lambda task: task.id if task.flow_root_id is None else task.flow_root_id,
    ),
    Key("priority", "{t}priority", "smallint", lambda task: task.priority),
    Key("id", "{t}id", "bigint", lambda task: task.id),
)

# The values of `KEYS` of one task.
Position: TypeAlias = tuple[int, ...]
# The position without its level: the place of a task among those of its level.
Place: TypeAlias = tuple[int, ...]
# Before every task.
START: Position = (0,) * len(KEYS)


def position_of(task: Any) -> Position:
    """The position of a task whose attributes have the names of the columns."""
    return tuple(int(key.of(task)) for key in KEYS)


def position_in(row: Any) -> Position:
    """The position in a row that has the keys by name."""
    return tuple(row[key.name] for key in KEYS)


@dataclass(frozen=True, slots=True)
class Head:
    """One of the first tasks of a level.

    Attributes:
        place: its place in the level.
        level: priority of its root flow, or its own without a flow; 0 is HIGHEST.
        waited_s: seconds since its submission, or since the start of its root flow.
        begun: it has entered a later stage.
    """

    place: Place
    level: int
    waited_s: float
    begun: bool = False

    @property
    def id(self) -> int:
        """The task's id."""
        return self.place[-1]


def level_of(head: Head, ageing_s: float | None) -> int:
    """The effective level of a task; None for `ageing_s` turns ageing off."""
    if ageing_s is None:
        return head.level
    # A clock that stepped back gives negative waiting times.
    gained = max(0.0, head.waited_s) / ageing_s
    # Bounded before the conversion: a tiny `ageing_s` makes it infinite.
    return head.level - int(min(gained, head.level))


def waits_s(level: int, oldest_s: Mapping[int, float], ageing_s: float | None) -> dict[int, float]:
    """The levels whose tasks may have an effective level, with the seconds that tasks have waited.

    A task that has waited for one more level may be selected there, before.

    Args:
        level: the effective level.
        oldest_s: seconds that the first task of each level has waited; no other has waited longer.
        ageing_s: seconds a level; None turns ageing off.
    """
    found = {level: 0.0}
    if ageing_s is not None:
        aged = {each: (each - level) * ageing_s for each in oldest_s if each > level}
        found |= {each: wait_s for each, wait_s in aged.items() if oldest_s[each] >= wait_s}
    return found


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
