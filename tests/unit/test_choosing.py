"""Choosing by id and by turns from the heads of lines, against naive models that see everything."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.choosing import Line, Turn, after, by_id, in_turns

KEYS = st.text(alphabet="ab\x01é", max_size=3)


@st.composite
def waiting(draw):
    """Tasks by key, and for each key how many may start and its weight."""
    keys = draw(st.lists(KEYS, min_size=1, max_size=6, unique=True))
    owners = draw(st.lists(st.sampled_from(keys), max_size=60))
    queues = {key: [number for number, owner in enumerate(owners) if owner == key] for key in keys}
    return {key: (queue, draw(st.integers(-1, 30)), draw(st.integers(1, 5))) for key, queue in queues.items()}


def lines(state, depth):
    return [
        Line(key, queue[:depth], room, weight, more=len(queue) > depth)
        for key, (queue, room, weight) in state.items()
    ]


def take(state, ids):
    """What is left once these have started."""
    chosen = set(ids)
    return {
        key: ([one for one in queue if one not in chosen], room - len(chosen.intersection(queue)), weight)
        for key, (queue, room, weight) in state.items()
    }


def drawn_out(state, depth, limits, choose):
    """Chooses again and again, reading only `depth` of each line, until nothing is left that may start."""
    released, turn = [], Turn()
    for limit in limits:
        choice = choose(lines(state, depth), limit, turn)
        assert len(choice.ids) <= limit
        assert choice.ids or not choice.cut
        if not choice.ids:
            break
        released += choice.ids
        state, turn = take(state, choice.ids), choice.turn
    return released


LIMITS = st.lists(st.integers(1, 20), min_size=200, max_size=200)


@given(waiting(), st.integers(1, 8), LIMITS)
def test_by_id_is_the_order_of_all_that_have_room(state, depth, limits):
    """S3, S5: however little of each line is read, and however many go at once, the order is that of the ids, without
    those whose keys are full."""
    expected = sorted(one for queue, room, _ in state.values() for one in queue[: max(0, room)])
    assert drawn_out(state, depth, limits, by_id) == expected


def naive_rounds(state):
    """Weighted round-robin with everything in sight."""
    queues = {key: list(queue[: max(0, room)]) for key, (queue, room, _) in sorted(state.items())}
    released = []
    while any(queues.values()):
        for key, queue in queues.items():
            weight = state[key][2]
            released += queue[:weight]
            del queue[:weight]
    return released


@given(waiting(), st.integers(1, 8), LIMITS)
def test_turns_are_those_of_a_round_robin_that_sees_everything(state, depth, limits):
    """S3: keys take turns, each as many as it weighs, whatever is read and released at once."""
    assert drawn_out(state, depth, limits, in_turns) == naive_rounds(state)


@given(waiting(), st.integers(1, 20))
def test_one_round_gives_each_key_its_weight_at_most(state, limit):
    """S3: where there are more keys than are looked at, none gives twice before the others."""
    choice = in_turns(lines(state, 100), limit, Turn(), once=True)
    for queue, room, weight in state.values():
        assert len(set(choice.ids).intersection(queue)) <= min(weight, max(0, room))
    assert len(choice.ids) == min(
        limit, sum(min(weight, len(queue), max(0, room)) for queue, room, weight in state.values())
    )


@given(KEYS, KEYS, st.integers(0, 3))
def test_a_turn_begins_where_the_last_one_ended(key, other, left):
    """S3: nothing is between a key and what comes after it, so no key is passed over, and "" is a key like any other."""
    assume(other != key)
    turn = Turn(key, left)
    assert (other >= turn.first) == (other > key)
    assert (key >= turn.first) == (left > 0)
    assert after(key) > key
    assert Turn().first == ""
