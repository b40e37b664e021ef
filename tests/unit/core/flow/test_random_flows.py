"""Random graphs, outcomes and interleavings against a reference model."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.flows import Owner, random_plan, random_world, reference

from penstock.core.flow import fan_out, joins, recovery
from penstock.core.flow.messages import Cancelled, Paused, Recovered, Refuse, Resumed
from penstock.core.flow.plan import NodeKind, Policy
from penstock.core.flow.state import EdgeState, FlowStatus, NodeStatus, StopReason
from penstock.core.flow.working import Working

CASES = settings(deadline=None, max_examples=100)
# Seeds of real generators: one that Hypothesis draws from costs fifteen times as much.
seeds = st.randoms(use_true_random=True)


def undisturbed(rng):
    """In whatever order and number endings arrive, each join, switch and map ends the same."""
    plan = random_plan(rng, Policy.CONTINUE)
    world = random_world(rng, plan)
    owner = Owner(plan, world).begin()
    owner.check()
    owner.run(rng)
    expected = reference(plan, world)
    assert owner.statuses() == expected
    failed = {"failed", "cancelled", "blocked"} & set(expected.values())
    assert owner.flow.status == (FlowStatus.FAILED if failed else FlowStatus.SUCCEEDED)


def disturbed(rng):
    """A flow that is paused, resumed, cancelled and recovered at random ends, and its counters are
    what its rows say."""
    plan = random_plan(rng, kinds=rng.choice([tuple(NodeKind), (NodeKind.MAP, NodeKind.TASK)]))
    owner = Owner(plan, random_world(rng, plan)).begin()
    cancelled = False
    for _ in range(rng.randint(1, 12)):
        match rng.choice(["end", "end", "drain", "pause", "resume", "cancel", "recover"]):
            case "end":
                owner.step(rng)
            case "drain":
                owner.run(rng)
            case "pause":
                owner.apply([Paused()])
            case "resume":
                owner.apply([Resumed()])
            case "cancel":
                cancelled = True
                owner.apply([Cancelled()])
            case "recover":
                chosen = rng.sample(sorted(plan.nodes), rng.randint(0, 1))
                before = owner.flow
                owner.apply([Recovered(before.generation + 1, frozenset(chosen))])
                cancelled &= owner.flow.generation == before.generation
        owner.check()
    owner.apply([Resumed()])
    owner.run(rng)
    assert owner.flow.status is not FlowStatus.RUNNING
    if cancelled and owner.flow.stop is StopReason.CANCEL:
        done = not owner.flow.unfinished and not owner.flow.unsuccessful
        assert owner.flow.status is (FlowStatus.SUCCEEDED if done else FlowStatus.CANCELLED)


def stopped(rng):
    """With the policy `stop`, what runs goes on to its end, and the flow fails."""
    plan = random_plan(rng, Policy.STOP)
    world = random_world(rng, plan)
    owner = Owner(plan, world).begin()
    owner.run(rng)
    expected = reference(plan, world)
    ends = owner.statuses()
    # A map that the failure of another node stopped is cancelled; nodes behind it are blocked.
    cut = plan.descendants(frozenset(name for name, end in ends.items() if end == "cancelled"))
    for name, end in ends.items():
        # A node that ran to its end did so as in the undisturbed flow; others did not start.
        assert end in (expected[name], "pending", "ready", "cancelled") or (end == "blocked" and name in cut)
    failed = {"failed", "cancelled"} & set(expected.values())
    assert owner.flow.status == (FlowStatus.FAILED if failed else FlowStatus.SUCCEEDED)


def recovered(rng):
    """Nodes and items that succeeded are carried; everything else runs once more."""
    plan = random_plan(rng)
    world = random_world(rng, plan, failing=0.5)
    world.heals = 1
    # A list that is shorter than k fails in each generation.
    world.totals = {name: max(total, plan.nodes[name].k or 0) for name, total in world.totals.items()}
    owner = Owner(plan, world).begin()
    if rng.random() < 0.3:
        owner.step(rng)
        owner.apply([Cancelled()])
    owner.run(rng)
    before = owner.statuses()
    failed = frozenset(name for name, node in before.items() if node in ("failed", "cancelled", "blocked"))
    history = dict(owner.history)
    items = {key for key, item in owner.items.items() if item.outcome == "succeeded"}
    carried = set(plan.nodes) - failed - plan.descendants(failed)
    if owner.flow.status is FlowStatus.SUCCEEDED:
        owner.apply([Recovered(1)])
        assert owner.actions[-1] == Refuse("nothing_to_recover")
        return
    owner.apply([Recovered(1), Recovered(1)])
    owner.apply([Recovered(1)])
    owner.check()
    owner.run(rng)
    assert owner.flow.status is FlowStatus.SUCCEEDED
    # The second run has the outcomes of a flow in which everything succeeds.
    assert owner.statuses() == reference(plan, world, generation=1)
    for child, count in owner.history.items():
        again = child not in history
        assert count == 1
        if again and child[0] in carried:
            assert before[child[0]] in ("pending", "ready"), f"{child} was carried, and ran again"
        if again and child[0] not in plan.descendants(failed):
            assert child[:2] not in items, f"{child} had succeeded"


# Each mutant fails within the first fifty.
SEEDS = 250
PROPERTIES = {"undisturbed": undisturbed, "disturbed": disturbed, "stopped": stopped, "recovered": recovered}


def check_seeds(count):
    for seed in range(count):
        for check in PROPERTIES.values():
            check(random.Random(seed))


@CASES
@given(seeds)
def test_a_minimal_load_decides_as_a_full_one(rng):
    """The owner loads touched nodes and their successors only."""
    plan = random_plan(rng, Policy.CONTINUE, kinds=(NodeKind.TASK, NodeKind.SWITCH))
    owner = Owner(plan, random_world(rng, plan)).begin()
    owner.run(rng)
    widest = max(len(found) for found in plan.successors.values())
    assert owner.largest_load <= len(plan.nodes)
    if all(len(node.edges) <= 1 for node in plan.nodes.values()) and len(plan.roots) == 1:
        assert owner.largest_load <= max(1, len(owner.applied)) * (widest + 1)


@pytest.mark.parametrize("name", PROPERTIES)
@CASES
@given(seeds)
def test_the_properties_hold_for_random_flows(name, rng):
    """F1, F3, F5: undisturbed flows, commands at random, the policy `stop`, and recoveries."""
    PROPERTIES[name](rng)


def test_the_properties_hold_for_many_seeds():
    """F1, F3, F5: the same as above with seeds that never change, which the mutants have, too."""
    check_seeds(SEEDS)


def early_join(plan, edge_states):
    found = joins_evaluate(plan, edge_states)
    return NodeStatus.READY if EdgeState.SUCCEEDED in edge_states.values() else found


def dead_edges_count(plan, edge_states):
    if EdgeState.DEAD in edge_states.values() and len(edge_states) == len(plan.edges):
        return NodeStatus.READY
    return joins_evaluate(plan, edge_states)


def eager_k(plan, edge_states):
    if plan.join.k and EdgeState.FAILED in edge_states.values():
        return NodeStatus.BLOCKED
    return joins_evaluate(plan, edge_states)


joins_evaluate = joins.evaluate
fan_out_window = fan_out.window


MUTANTS = {
    "a join fires at its first edge": (joins, "evaluate", early_join),
    "a dead edge starts a join": (joins, "evaluate", dead_edges_count),
    "a join of k gives up at the first failure": (joins, "evaluate", eager_k),
    "a join never becomes skipped": (
        joins,
        "evaluate",
        lambda plan, edge_states: (
            NodeStatus.PENDING
            if joins_evaluate(plan, edge_states) is NodeStatus.SKIPPED
            else joins_evaluate(plan, edge_states)
        ),
    ),
    "a case is ignored": (
        joins,
        "edge_state",
        lambda source, edge: joins_edge_state(source, replace(edge, case=None)),
    ),
    "one item too few opens": (
        fan_out,
        "window",
        lambda plan, node: None if node.items.opened == 2 else fan_out_window(plan, node),
    ),
    "more items than the window open": (
        fan_out,
        "window",
        lambda plan, node: fan_out_window(replace(plan, parallel=plan.parallel + 1), node),
    ),
    "a tolerated failure fails the map": (
        fan_out,
        "cannot_succeed",
        lambda plan, items: items.unsuccessful > 0,
    ),
    "any number of items is enough": (fan_out, "is_enough", lambda plan, items: items.succeeded > 0),
    "the end of an item counts twice": (
        fan_out,
        "count_ends",
        lambda items, ended: fan_out_count_ends(fan_out_count_ends(items, ended), ended),
    ),
    "an ending of an old generation counts": (
        Working,
        "is_current",
        lambda self, name, generation: self.nodes[name].status is NodeStatus.RUNNING,
    ),
    "an ending counts twice": (
        Working,
        "is_current",
        lambda self, name, generation: self.nodes[name].status is not NodeStatus.PENDING,
    ),
    "a stop does not wake maps": (
        Working,
        "stop",
        lambda self, reason: setattr(self, "flow", self.flow._replace(stop=reason)),
    ),
    "a recovery runs every item again": (recovery, "_carried", lambda items: None),
    "a skipped end is not propagated": (
        Working,
        "propagate",
        lambda self, name: (
            None if self.nodes[name].status is NodeStatus.SKIPPED else working_propagate(self, name)
        ),
    ),
}
joins_edge_state = joins.edge_state
fan_out_count_ends = fan_out.count_ends
working_propagate = Working.propagate


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_properties_find_mutants(monkeypatch, mutant):
    """A property that no fault breaks proves nothing."""
    target, name, change = MUTANTS[mutant]
    monkeypatch.setattr(target, name, change)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check_seeds(SEEDS)
