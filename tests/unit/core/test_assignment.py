"""Assignment of types to replicas that join and leave; each replica plans for itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.assignment import plan


@st.composite
def histories(draw):
    """Draws steps: a member joins, leaves or acts, or a type is registered."""
    step = st.tuples(st.sampled_from(["come", "go", "act", "act", "act", "type"]), st.integers(0, 7))
    return draw(st.lists(step, max_size=60))


def act(me, members, owners):
    """Carries out the plan of one replica; returns the number of moved types."""
    found = plan(me, members, owners)
    for name in found.transfer:
        assert owners[name] == me
        owners[name] = None
    for name in found.acquire[: found.max_acquired]:
        assert owners[name] is None
        owners[name] = me
    assert len(found.transfer) <= 1, "a type at a time"
    return len(found.transfer) + len(found.acquire[: found.max_acquired])


@given(st.lists(st.integers(0, 3), min_size=3, max_size=12), st.permutations(range(3)))
def test_busy_replicas_keep_their_shares(owned_by, eager):
    """S7: replicas act in any order, and eager ones repeatedly while others are busy. At most three
    moves for each type lead to even shares."""
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


def test_a_released_type_goes_to_replicas_with_fewer_types():
    """S7: with 3, 3 and 1 types, one replica releases a type, and neither large replica takes it
    back."""
    owners = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 1, "g": 2}
    assert act(0, {0, 1, 2}, owners) == 1
    assert [act(me, {0, 1, 2}, owners) for me in (0, 1, 0, 2, 0, 1)] == [0, 0, 0, 1, 0, 0]


@given(histories(), st.integers(0, 12), st.permutations(range(8)))
def test_every_type_has_an_owner_and_shares_are_even(history, foreign, order):
    """S7: for any history and order, replicas reach a stable assignment within a few rounds for
    each type.

    Each of their types then has an owner, and shares differ by at most one. Types of another
    version stay.
    """
    members, owners = {0}, {f"foreign-{n}": 99 for n in range(foreign)}
    for step, number in history:
        if step == "come":
            members.add(number)
        elif step == "go" and len(members) > 1:
            members.discard(number)
            # The locks end with the session.
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


def test_a_new_replica_gets_only_its_share():
    """S7: a third replica gets three of ten types, and no other type moves."""
    owners = {f"t{n}": n % 2 for n in range(10)}
    before = dict(owners)
    for _ in range(6):
        for me in range(3):
            act(me, {0, 1, 2}, owners)
    assert sum(owner == 2 for owner in owners.values()) == 3
    assert sum(owners[name] != before[name] for name in owners) == 3


def test_no_type_is_released_while_another_is_free():
    """S7: during a handover one type has no owner, and the next type waits until it is acquired."""
    owners = {"a": 0, "b": 0, "c": 0, "d": 0}
    assert plan(0, {0, 1}, owners).transfer == ["d"]
    assert plan(0, {0, 1}, {**owners, "d": None}).transfer == []
