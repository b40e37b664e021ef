"""Spreading types over replicas: what one takes and gives up. Pure: no I/O, no clock.

Each replica decides for itself by what all of them see: who is there, and who owns what. Whatever order they act in, they
come to rest when no replica owns two types more than another, and then nothing moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Plan(NamedTuple):
    """What a replica does now.

    Attributes:
        take: types that nobody owns.
        most: how many of these it should own at most.
        give: a type it owns and another should, if there is one.
    """

    take: list[str]
    most: int
    give: list[str]


def plan(me: int, members: Collection[int], owners: Mapping[str, int | None]) -> Plan:
    """What `me` does.

    Args:
        me: one of the members.
        members: every replica that is there.
        owners: by type: a member, nobody, or who is no member (of an earlier version) and keeps what it has.
    """
    owned = Counter(dict.fromkeys(members, 0))
    owned.update(owner for owner in owners.values() if owner is not None and owner in owned)
    free = sorted(name for name, owner in owners.items() if owner is None)
    least, rest = divmod(len(free) + owned.total(), len(owned))
    most = least + bool(rest)
    mine = sorted(name for name, owner in owners.items() if owner == me)
    spare = max(0, len(mine) - most)
    if len(mine) == most > least:
        # Some have too few although nobody has too many: as many of those with one more give it up.
        lacking = sum(least - count for count in owned.values() if count < least)
        lacking -= len(free) + sum(count - most for count in owned.values() if count > most)
        spare = int(me in sorted(one for one, count in owned.items() if count == most)[: max(0, lacking)])
    room = max(0, most - len(mine))
    lacks = sum(max(0, least - count) for count in owned.values())
    if len(mine) >= least and len(free) <= lacks:
        # All that is free is for those who have too few: else whoever gave it to them could be first to take it back.
        room = 0
    # One after the other, so that each is without an owner only for as long as it takes to take it.
    return Plan(free, room, mine[-1:] if spare and not free else [])
