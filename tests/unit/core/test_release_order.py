"""Ageing and finish_first, from the heads of the levels, compared with a model of all tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.release_order import Head, first, level_of

# A plain task has one member, a flow has up to four: own priority, and whether it has begun.
MEMBERS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=4)
TASKS = st.lists(st.tuples(st.integers(0, 4), st.floats(0, 10), MEMBERS), max_size=30)


def head(task_id, level, waited_s, *, begun=False):
    return Head((task_id, level, task_id), level, waited_s, begun)


def aged(tasks):
    """Heads in the order of their places; each task or flow has a shorter wait than the one
    before."""
    waited_s, found = sum(gap for _, gap, _ in tasks), []
    for number, (level, gap, members) in enumerate(tasks):
        waited_s -= gap
        places = sorted(
            ((number, priority, 1_000 - len(found) - nth), begun)
            for nth, (priority, begun) in enumerate(members)
        )
        if len(members) == 1:
            places = [((number, level, number), members[0][1])]
        found += [Head(place, level, max(0.0, waited_s), begun) for place, begun in places]
    return found


def read(heads, limit, *, finish_first):
    """Reads heads like the statement: the first tasks of each level, and of its tasks that have
    begun."""
    found = []
    for level in range(5):
        here = [head for head in heads if head.level == level]
        found += [Head(h.place, h.level, h.waited_s) for h in here[:limit]]
        if finish_first:
            found += [h for h in here if h.begun][:limit]
    return found


@given(TASKS, st.integers(1, 10), st.one_of(st.none(), st.floats(0.5, 50)), st.booleans())
def test_the_heads_of_the_levels_are_enough(tasks, limit, ageing_s, finish_first):
    """S3: the first tasks of all are among the first tasks of each level."""
    heads = aged(tasks)
    naive = sorted(
        heads, key=lambda h: (not h.begun if finish_first else False, level_of(h, ageing_s), h.place)
    )
    chosen = first(read(heads, limit, finish_first=finish_first), limit, ageing_s)
    assert list(chosen) == [head.id for head in naive[:limit]]
    assert list(chosen.values()) == sorted(chosen.values()), (
        "sorted by level as they come, they keep their order"
    )
    begun = {head.id for head in heads if head.begun and finish_first}
    assert chosen == {h.id: 0 if h.id in begun else level_of(h, ageing_s) for h in naive[:limit]}


@given(TASKS, st.floats(0.5, 50))
def test_an_aged_task_is_not_overtaken_by_younger_ones(tasks, ageing_s):
    """S3: after `level` times `ageing_s`, only older tasks, or tasks of older flows, precede it."""
    heads = {h.id: Head(h.place, h.level, h.waited_s) for h in aged(tasks)}
    order = list(first(heads.values(), len(heads), ageing_s))
    for one in heads.values():
        if one.waited_s >= one.level * ageing_s + 1e-6:
            assert all(heads[other].place <= one.place for other in order[: order.index(one.id)])


def test_without_ageing_priorities_stay():
    """S3: ageing is off by default, and LOWEST waits without a limit."""
    assert first([head(1, 4, 1e9), head(2, 0, 0.0)], 2, None) == {2: 0, 1: 4}
    assert list(first([head(1, 4, -5.0), head(2, 3, 0.0)], 2, 1.0)) == [2, 1]


def test_child_flows_share_the_place_of_their_root():
    """S3: tasks of a flow stay together in the place of its root, by their own priority."""
    heads = [
        head(5, 2, 5.0),
        Head((1, 4, 6), 2, 9.0),
        Head((1, 0, 90), 2, 9.0),
        head(2, 2, 8.0),
    ]
    assert list(first(heads, 4, None)) == [90, 6, 2, 5]


def test_a_tiny_ageing_time_does_not_overflow():
    """S3: with the smallest ageing time, any task that has waited is HIGHEST."""
    assert level_of(head(1, 4, 1.0), 5e-324) == 0
    assert level_of(head(1, 4, 0.0), 5e-324) == 4
