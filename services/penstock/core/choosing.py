"""Which of the tasks that are ready are released next, where keys are limited or take turns. Pure.

A line is what waits at one level under one key, in the order of ids. Only its first tasks are read: when they are used up
and more wait behind, the choice ends there, and the next one goes on; so what is chosen is what would have been chosen
had everything been read.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """The first tasks of one key at one level.

    Attributes:
        key: whose.
        ids: in order.
        room: how many of this key may start.
        weight: how many it may give in its turn.
        more: others wait behind these.
    """

    key: str
    ids: Sequence[int]
    room: int
    weight: int = 1
    more: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the round of the keys of a level is.

    Attributes:
        key: the one that gave last; None before the first. "" is what has no key.
        left: how many it may still give before it is another's turn.
    """

    key: str | None = None
    left: int = 0

    @property
    def first(self) -> str:
        """Whose turn it is: the first key that is not before this one."""
        if self.key is None:
            return ""
        return self.key if self.left else after(self.key)


def after(key: str) -> str:
    """What comes directly behind a key, by code point: the same with the lowest character behind it."""
    return f"{key}\x01"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        ids: in order of release.
        cut: it ended because not enough was read of a line.
        turn: where the round is now.
    """

    ids: list[int]
    cut: bool
    turn: Turn


def by_id(lines: Sequence[Line], limit: int, turn: Turn) -> Choice:
    """The first tasks by id of all keys that have room."""
    chosen: list[int] = []
    rooms = [line.room for line in lines]
    heads = [(line.ids[0], number, 0) for number, line in enumerate(lines) if line.ids and line.room > 0]
    heapq.heapify(heads)
    while heads and len(chosen) < limit:
        task_id, number, place = heapq.heappop(heads)
        chosen.append(task_id)
        line = lines[number]
        rooms[number] -= 1
        if rooms[number] <= 0:
            continue
        if place + 1 < len(line.ids):
            heapq.heappush(heads, (line.ids[place + 1], number, place + 1))
        elif line.more:
            return Choice(chosen, cut=True, turn=turn)
    return Choice(chosen, cut=False, turn=turn)


def in_turns(lines: Sequence[Line], limit: int, turn: Turn, *, once: bool = False) -> Choice:
    """Round after round: each key with room gives as many as it weighs.

    Args:
        lines: of different keys, in any order.
        limit: most tasks.
        turn: where the round is.
        once: only one round, since there are more keys than these.
    """
    chosen: list[int] = []
    waiting = sorted((line for line in lines if line.ids and line.room > 0), key=lambda line: line.key)
    begin = next((place for place, line in enumerate(waiting) if line.key >= turn.first), 0)
    waiting = waiting[begin:] + waiting[:begin]
    given = dict.fromkeys((line.key for line in waiting), 0)
    while waiting:
        following = []
        for line in waiting:
            if len(chosen) >= limit:
                return Choice(chosen, cut=False, turn=turn)
            quantum = turn.left if turn.left and turn.key == line.key else line.weight
            begin = given[line.key]
            there = min(len(line.ids), line.room)
            count = min(quantum, there - begin, limit - len(chosen))
            chosen += line.ids[begin : begin + count]
            given[line.key] = begin + count
            used_up = begin + count == there
            # What a key cannot give is not kept for it.
            goes_on = line.more and there < line.room
            turn = Turn(line.key, quantum - count if not used_up or goes_on else 0)
            if used_up and goes_on:
                return Choice(chosen, cut=True, turn=turn)
            if not used_up:
                following.append(line)
        if once:
            break
        waiting = following
    return Choice(chosen, cut=False, turn=turn)
