"""Selection by id and round-robin from the heads of queues, compared with naive models of all
tasks."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.fair_queueing import Cursor, KeyQueue, select_in_order, select_round_robin, successor

KEYS = st.text(alphabet="ab\x01é", max_size=3)


@st.composite
def queues_by_key(draw):
    """Draws the tasks of each concurrency key, how many of them may start, and the weight of the
    key."""
    keys = draw(st.lists(KEYS, min_size=1, max_size=6, unique=True))
    owners = draw(st.lists(st.sampled_from(keys), max_size=60))
    queues = {key: [number for number, owner in enumerate(owners) if owner == key] for key in keys}
    return {key: (queue, draw(st.integers(-1, 30)), draw(st.integers(1, 5))) for key, queue in queues.items()}


def queue_heads(state, depth):
    return [
        KeyQueue(key, queue[:depth], room, weight, more=len(queue) > depth)
        for key, (queue, room, weight) in state.items()
    ]


def remove_started(state, ids):
    """Removes started tasks from the queues."""
    chosen = set(ids)
    return {
        key: ([one for one in queue if one not in chosen], room - len(chosen.intersection(queue)), weight)
        for key, (queue, room, weight) in state.items()
    }


def select_all(state, depth, limits, select):
    """Selects repeatedly, with `depth` tasks of each queue in view, until no task may start."""
    released, cursor = [], Cursor()
    for limit in limits:
        choice = select(queue_heads(state, depth), limit, cursor)
        assert len(choice.ids) <= limit
        assert choice.ids or not choice.truncated
        if not choice.ids:
            break
        released += choice.ids
        state, cursor = remove_started(state, choice.ids), choice.cursor
    return released


LIMITS = st.lists(st.integers(1, 20), min_size=200, max_size=200)


@given(queues_by_key(), st.integers(1, 8), LIMITS)
def test_selection_by_id_keeps_the_order_of_ids(state, depth, limits):
    """S3, S5: tasks are selected in the order of their ids, without tasks of full keys, for any
    depth and limit."""
    expected = sorted(one for queue, room, _ in state.values() for one in queue[: max(0, room)])
    assert select_all(state, depth, limits, select_in_order) == expected


def naive_rounds(state):
    """Weighted round-robin over all tasks."""
    queues = {key: list(queue[: max(0, room)]) for key, (queue, room, _) in sorted(state.items())}
    released = []
    while any(queues.values()):
        for key, queue in queues.items():
            weight = state[key][2]
            released += queue[:weight]
            del queue[:weight]
    return released


@given(queues_by_key(), st.integers(1, 8), LIMITS)
def test_selection_equals_round_robin_over_all_tasks(state, depth, limits):
    """S3: each key releases as many tasks per turn as its weight, for any depth and limit."""
    assert select_all(state, depth, limits, select_round_robin) == naive_rounds(state)


@given(queues_by_key(), st.integers(1, 20))
def test_one_round_selects_at_most_the_weight_of_each_key(state, limit):
    """S3: with more keys than one selection reads, no key has two turns before all others have
    one."""
    choice = select_round_robin(queue_heads(state, 100), limit, Cursor(), one_round=True)
    for queue, room, weight in state.values():
        assert len(set(choice.ids).intersection(queue)) <= min(weight, max(0, room))
    assert len(choice.ids) == min(
        limit, sum(min(weight, len(queue), max(0, room)) for queue, room, weight in state.values())
    )


@given(KEYS, KEYS, st.integers(0, 3))
def test_a_turn_starts_where_the_last_one_ended(key, other, left):
    """S3: no key lies between a key and its successor, so no key is skipped. "" is a valid key."""
    assume(other != key)
    cursor = Cursor(key, left)
    assert (other >= cursor.first) == (other > key)
    assert (key >= cursor.first) == (left > 0)
    assert successor(key) > key
    assert Cursor().first == ""
