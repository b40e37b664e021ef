"""Assignment of task types to the replicas of task-sync. Pure: no I/O, no clock.

Each replica decides for itself from two shared facts: the members, and the owner of each type. In
any order of actions, the assignment is stable once no replica owns two types more than another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Plan(NamedTuple):
    """The next actions of a replica.

    Attributes:
        acquire: types without an owner.
        max_acquired: how many of these the replica acquires at most.
        transfer: at most one type that it owns and another replica should own.
    """

    acquire: list[str]
    max_acquired: int
    transfer: list[str]


def plan(me: int, members: Collection[int], owners: Mapping[str, int | None]) -> Plan:
    """Plans the next actions of the replica `me`.

    Args:
        me: one of the members.
        members: all live replicas.
        owners: by type: a member, None, or a session that is no replica, which keeps its types.
    """
    owned = Counter(dict.fromkeys(members, 0))
    owned.update(owner for owner in owners.values() if owner is not None and owner in owned)
    free = sorted(name for name, owner in owners.items() if owner is None)
    fair_min, remainder = divmod(len(free) + owned.total(), len(owned))
    fair_max = fair_min + bool(remainder)
    own = sorted(name for name, owner in owners.items() if owner == me)
    surplus = max(0, len(own) - fair_max)
    if len(own) == fair_max > fair_min:
        # Some replicas are below the minimum although none is above the maximum: as many replicas
        # at the maximum give one.
        missing = sum(fair_min - count for count in owned.values() if count < fair_min)
        missing -= len(free) + sum(count - fair_max for count in owned.values() if count > fair_max)
        at_maximum = sorted(member for member, count in owned.items() if count == fair_max)
        surplus = int(me in at_maximum[: max(0, missing)])
    room = max(0, fair_max - len(own))
    total_missing = sum(max(0, fair_min - count) for count in owned.values())
    if len(own) >= fair_min and len(free) <= total_missing:
        # All free types are for replicas below the minimum. Without this, the replica that gave one
        # could take it back.
        room = 0
    # One transfer at a time, so that each type is without an owner only until another replica
    # acquires it.
    return Plan(free, room, own[-1:] if surplus and not free else [])
