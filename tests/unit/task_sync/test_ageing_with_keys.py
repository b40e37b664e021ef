"""The release by concurrency key with ageing, compared with a model that sorts all tasks."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from penstock.contracts.task_type import TaskType
from penstock.core.fair_queueing import KeyQueue
from penstock.core.release_order import Head, level_of
from penstock.postgres import limits
from penstock.postgres.limits import UNLIMITED, TypeVersion
from penstock.postgres.release import Batch, Released
from penstock.task_sync import key_scan
from penstock.task_sync.limits import ReleaseLimiter

AGEING_S = 10.0
TASKS = st.lists(
    # Level, seconds since the task before, and concurrency key.
    st.tuples(st.integers(0, 4), st.integers(0, 15), st.sampled_from("abcdef")),
    max_size=40,
)
ROOMS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5))


@dataclass
class Rows:
    """The rows of a type, and the statements of `penstock.postgres.limits` that a release uses.

    Attributes:
        heads: of the ready tasks, by id.
        keys: of the tasks, by id.
        rooms: of the keys that have a limit.
        depth: tasks that a queue has at most.
        levels: those of the released tasks, in order.
    """

    heads: dict[int, Head]
    keys: dict[int, str]
    rooms: dict[str, int]
    depth: int
    levels: dict[int, int] = field(default_factory=dict)

    async def versions(self, _session: Any) -> dict[str, TypeVersion]:
        return {"t": TypeVersion("1", keyed=True)}

    async def track(self, *_arguments: Any, **_named: Any) -> tuple[int, int]:
        return 0, 0

    async def set_empty_keys(self, *_arguments: Any) -> tuple[None, int]:
        return None, 0

    async def first(self, _session: Any, _type: TaskType, limit: int, _excluded: Any) -> list[Head]:
        return [head for level in range(5) for head in self._of(level)[:limit]]

    def _of(self, level: int) -> list[Head]:
        return sorted((h for h in self.heads.values() if h.level == level), key=lambda h: h.place)

    async def key_queues(
        self, _session: Any, _type: TaskType, size: limits.PageSize, first: str, end: str | None = None
    ) -> list[KeyQueue]:
        names = {self.keys[head.id] for level in size.waits_s for head in self._of(level)}
        page = sorted(name for name in names if name >= first)[: size.keys]
        return [self._queue(name, size) for name in page if end is None or name < end]

    def _queue(self, name: str, size: limits.PageSize) -> KeyQueue:
        room = self.rooms.get(name, UNLIMITED)
        depth = max(0, min(room, self.depth, size.tasks))
        places = []
        for level, wait_s in size.waits_s.items():
            queue = [h for h in self._of(level) if self.keys[h.id] == name and h.id not in size.excluded]
            places += [head.place for head in queue[:depth] if head.waited_s >= wait_s or not wait_s]
        places = sorted(places)[:depth]
        ids = [place[-1] for place in places]
        return KeyQueue(name, ids, room, more=len(ids) == depth, places=places)

    async def release_selected(
        self, _session: Any, _type: TaskType, levels: dict[int, int], *_arguments: Any
    ) -> Released:
        for task_id, level in levels.items():
            del self.heads[task_id]
            if (key := self.keys[task_id]) in self.rooms:
                self.rooms[key] -= 1
            self.levels[task_id] = level
        return Released(Batch(1, list(levels)), [])  # type: ignore[arg-type]


def made(tasks: list[tuple[int, int, str]], rooms: dict[str, int], depth: int) -> Rows:
    """Rows; the first task has waited longest."""
    waited_s, heads, keys = sum(gap for _, gap, _ in tasks), {}, {}
    for number, (level, gap, key) in enumerate(tasks, 1):
        waited_s -= gap
        heads[number], keys[number] = Head((number,), level, waited_s - 1.0), key
    return Rows(heads, keys, dict(rooms), depth)


def drain(rows: Rows, limit: int, *, fair: bool, keys_per_page: int = 256) -> None:
    """Releases tasks until no more may be released, with at most `limit` a release."""

    async def run() -> None:
        limiter = ReleaseLimiter(None, lambda _name: None)  # type: ignore[arg-type]
        await limiter.load()
        task_type = TaskType(name="t", ageing_s=AGEING_S, fair=fair, paused=False)
        more = True
        while more:
            result = await limiter.release(task_type, limit, list)
            assert result.batch is None or len(result.batch.tasks) <= limit
            more = result.more
        limiter.close()

    statements = {
        name: getattr(rows, name)
        for name in ("versions", "track", "set_empty_keys", "key_queues", "release_selected")
    }
    with (
        patch.multiple(limits, heads=rows.first, **statements),
        patch.object(key_scan, "KEYS_PER_PAGE", keys_per_page),
    ):
        asyncio.run(run())


def model(rows: Rows) -> dict[int, int]:
    """All tasks by effective level and place, each if its key has room; with their levels."""
    rooms, order = dict(rows.rooms), {}
    by_level = sorted(rows.heads.values(), key=lambda head: (level_of(head, AGEING_S), head.place))
    for head in by_level:
        key = rows.keys[head.id]
        if rooms.get(key, 1) > 0:
            order[head.id] = level_of(head, AGEING_S)
            if key in rooms:
                rooms[key] -= 1
    return order


@given(TASKS, ROOMS, st.integers(1, 10), st.integers(1, 4))
def test_tasks_are_released_by_effective_level_and_place(tasks, rooms, limit, depth):
    """S3, S5: with ageing and limits of keys, the order is effective level, then place, among the
    tasks whose keys have room. Workers get the effective levels."""
    rows = made(tasks, rooms, depth)
    expected = model(rows)
    drain(rows, limit, fair=False)
    assert list(rows.levels.items()) == list(expected.items())


@given(TASKS, ROOMS, st.integers(1, 10), st.integers(1, 4))
def test_fair_queueing_within_an_effective_level(tasks, rooms, limit, depth):
    """S3, S5: with fair queueing as well, keys take turns among tasks of one effective level. Each
    key has its own order, and the number of tasks that its limit allows."""
    rows = made(tasks, rooms, depth)
    expected = model(rows)
    drain(rows, limit, fair=True)
    assert rows.levels == expected
    assert list(rows.levels.values()) == sorted(rows.levels.values())
    for key in "abcdef":
        assert [one for one in rows.levels if rows.keys[one] == key] == [
            one for one in expected if rows.keys[one] == key
        ]
    for level in range(5):
        turns = [rows.keys[one] for one in rows.levels if rows.levels[one] == level]
        waiting = Counter(turns)
        # In each round each key has one turn, until it has no task left.
        while turns:
            one_round, turns = turns[: len(waiting)], turns[len(waiting) :]
            assert set(one_round) == set(waiting)
            waiting -= Counter(one_round)


@given(TASKS, ROOMS, st.integers(1, 10), st.integers(1, 4), st.booleans())
def test_pages_of_keys_lose_no_task(tasks, rooms, limit, depth, fair):
    """S5: where keys are read in several pages and releases, each task whose key has room is
    released once, and each key in its own order."""
    rows = made(tasks, rooms, depth)
    expected = model(rows)
    drain(rows, limit, fair=fair, keys_per_page=2)
    assert rows.levels.keys() == expected.keys()
    for key in "abcdef":
        assert [one for one in rows.levels if rows.keys[one] == key] == [
            one for one in expected if rows.keys[one] == key
        ]
