"""Types spread over replicas that come and go, each deciding for itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.spread import plan


@st.composite
def histories(draw):
    """Steps: a member comes, goes or acts; a type is registered."""
    step = st.tuples(st.sampled_from(["come", "go", "act", "act", "act", "type"]), st.integers(0, 7))
    return draw(st.lists(step, max_size=60))


def act(me, members, owners):
    """One replica does what it plans; how many types moved."""
    found = plan(me, members, owners)
    for name in found.give:
        assert owners[name] == me
        owners[name] = None
    for name in found.take[: found.most]:
        assert owners[name] is None
        owners[name] = me
    assert len(found.give) <= 1, "a type at a time"
    return len(found.give) + len(found.take[: found.most])


@given(st.lists(st.integers(0, 3), min_size=3, max_size=12), st.permutations(range(3)))
def test_whoever_is_busy_loses_nothing_to_those_who_are_not(owned_by, eager):
    """S7: replicas act in any order, the eager again and again while others are busy: there are at most three moves a type, so
    nothing goes to and fro, and then shares are even."""
    members = set(eager)
    owners = {f"t{n:02}": owner if owner in members else None for n, owner in enumerate(owned_by)}
    moves = 0
    while True:
        able = [me for me in eager if act(me, members, dict(owners))]
        if not able:
            break
        moves += act(able[0], members, owners)
        assert moves <= 3 * len(owners)
    shares = [sum(owner == me for owner in owners.values()) for me in members]
    assert max(shares) - min(shares) <= 1
    assert None not in owners.values()


def test_who_gives_a_type_up_leaves_it_to_those_with_too_few():
    """S7: of seven types of three replicas, 3, 3 and 1: one gives one up, and does not take it back, nor does the other."""
    owners = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 1, "g": 2}
    assert act(0, {0, 1, 2}, owners) == 1
    assert [act(me, {0, 1, 2}, owners) for me in (0, 1, 0, 2, 0, 1)] == [0, 0, 0, 1, 0, 0]


@given(histories(), st.integers(0, 12), st.permutations(range(8)))
def test_every_type_is_owned_and_nobody_has_two_more_than_another(history, foreign, order):
    """S7: from whatever came before, in whatever order replicas act, all come to rest within a few rounds a type: each type of theirs
    has an owner, shares differ by one at most, and then nothing moves. What another version owns stays there."""
    members, owners = {0}, {f"foreign-{n}": 99 for n in range(foreign)}
    for step, number in history:
        if step == "come":
            members.add(number)
        elif step == "go" and len(members) > 1:
            members.discard(number)
            # Its session ends, and its locks with it.
            owners |= {name: None for name, owner in owners.items() if owner == number}
        elif step == "act" and number in members:
            act(number, members, owners)
        elif step == "type":
            owners.setdefault(f"t{len(owners)}", None)
    rounds = 0
    while sum(act(me, members, owners) for me in order if me in members):
        rounds += 1
        assert rounds <= len(owners) + 3
    shares = [sum(owner == me for owner in owners.values()) for me in members]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == len(owners) - foreign
    assert None not in owners.values()


def test_a_new_replica_gets_its_share_and_no_more_moves_than_that():
    """S7: of ten types of two replicas a third gets three, and nothing else moves."""
    owners = {f"t{n}": n % 2 for n in range(10)}
    before = dict(owners)
    for _ in range(6):
        for me in range(3):
            act(me, {0, 1, 2}, owners)
    assert sum(owner == 2 for owner in owners.values()) == 3
    assert sum(owners[name] != before[name] for name in owners) == 3


def test_nothing_is_given_up_while_something_is_free():
    """S7: a handover is one type without an owner, and the next waits until that one is taken."""
    owners = {"a": 0, "b": 0, "c": 0, "d": 0}
    assert plan(0, {0, 1}, owners).give == ["d"]
    assert plan(0, {0, 1}, {**owners, "d": None}).give == []
