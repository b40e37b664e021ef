"""Simulated flows: clocks, critical path, slots and limits."""

import random

import pytest
from tests.support.flows import random_plan, random_world, reference

from penstock.core.flow.plan import Edge, Join, NodeKind, NodePlan, Plan, Policy
from penstock.core.flow.simulation import Assumption, simulate
from penstock.core.flow.state import Outcome

FAILED = Outcome.FAILED


def task(*after, kind=NodeKind.TASK, **fields):
    return NodePlan(kind, tuple(Edge(*name.split(".")) for name in after), **fields)


def simulated(nodes, assumed, **fields):
    plan = Plan(nodes, fields.pop("policy", Policy.STOP), **fields)
    return simulate(plan, {name: Assumption(1.0) for name in nodes} | assumed)


def times(found):
    return {span.node: (span.started_s, span.ended_s) for span in found.spans}


def test_a_diamond_takes_as_long_as_its_longest_path():
    """The critical path is that path, and parallel tasks need a slot each."""
    nodes = {"a": task(), "b": task("a"), "c": task("a"), "d": task("b", "c")}
    found = simulated(nodes, {"b": Assumption(5), "c": Assumption(3)})
    assert times(found) == {"a": (0, 1), "b": (1, 6), "c": (1, 4), "d": (6, 7)}
    assert (found.status, found.takes_s, found.slots) == ("succeeded", 7, 2)
    assert found.critical_path == ("a", "b", "d")


def test_the_first_edge_of_any_is_critical():
    """A source that ends after the start did not decide it."""
    nodes = {"slow": task(), "quick": task(), "end": task("slow", "quick", join=Join(k=1))}
    found = simulated(nodes, {"slow": Assumption(9), "end": Assumption(20)})
    assert times(found)["end"] == (1, 21)
    assert found.critical_path == ("quick", "end")


@pytest.mark.parametrize(("parallel", "takes_s", "slots"), [(1, 30, 1), (4, 9, 4), (100, 3, 10)])
def test_a_map_takes_slots_as_its_window_allows(parallel, takes_s, slots):
    """F6: items run in waves."""
    found = simulated({"m": task(kind=NodeKind.MAP, parallel=parallel)}, {"m": Assumption(3, items=10)})
    assert (found.takes_s, found.slots) == (takes_s, slots)


def test_waits_timers_and_child_flows_need_no_slot():
    """F2: waiting holds nothing."""
    nodes = {
        "w": task(kind=NodeKind.WAIT),
        "t": task(kind=NodeKind.TIMER),
        "f": task(kind=NodeKind.FLOW, recoverable_child=True),
        "m": task(kind=NodeKind.MAP, recoverable_child=True),
    }
    assert simulated(nodes, {"m": Assumption(1, items=9)}).slots == 0


def test_the_case_of_a_switch_decides_what_runs():
    """Nodes on the other branch are skipped, and have no start."""
    nodes = {"s": task(kind=NodeKind.SWITCH), "a": task("s.big"), "b": task("s.small")}
    found = simulated(nodes, {"s": Assumption(1, case="big")})
    assert times(found) == {"s": (0, 0), "a": (0, 1), "b": (None, 0)}
    assert [span.node for span in found.spans] == ["s", "a", "b"]


def test_limits_run_on_the_clock():
    """A node, and a flow, that take too long are cancelled when their time is over."""
    nodes = {"a": task(finish_within_s=4, warn_after_s=2, start_within_s=1), "b": task("a")}
    found = simulated(nodes, {"a": Assumption(9)})
    assert (found.status, found.takes_s, found.late) == ("failed", 4, ("a",))
    assert times(found) == {"a": (0, 4), "b": (None, 4)}
    found = simulated({"a": task()}, {"a": Assumption(9)}, timeout_s=3, warn_after_s=2)
    assert (found.status, found.takes_s, found.late) == ("failed", 3, (None,))


def test_a_failure_ends_a_flow_with_the_policy_stop():
    """A running node goes on to its end."""
    nodes = {"a": task(), "b": task(), "c": task("b")}
    found = simulated(nodes, {"a": Assumption(1, FAILED), "b": Assumption(5)})
    assert (found.status, found.takes_s) == ("failed", 5)
    assert times(found)["c"] == (None, None)


def test_a_simulation_ends_as_the_graph_says():
    """Random flows with random durations end as the reference model says."""
    for seed in range(400):
        rng = random.Random(seed)
        plan = random_plan(rng, Policy.CONTINUE)
        world = random_world(rng, plan)
        assumptions = {
            name: Assumption(
                takes_s=rng.choice([0, 1, 1, 2.5, 7]),
                outcome=world.ends.get((name,), Outcome.SUCCEEDED),
                case=world.cases[name],
                items=world.totals[name],
                failing=frozenset(key[1] for key in world.ends if key[0] == name and len(key) == 2),
            )
            for name in plan.nodes
        }
        found = simulate(plan, assumptions)
        assert {span.node: span.status.value for span in found.spans} == reference(plan, world)
        assert found.takes_s == max(span.ended_s for span in found.spans)
        by_name = {span.node: span for span in found.spans}
        for earlier, later in zip(found.critical_path, found.critical_path[1:], strict=False):
            assert by_name[earlier].ended_s <= by_name[later].started_s


def test_a_large_map_is_simulated():
    """F6: 100,000 items in waves of a thousand."""
    found = simulated({"m": task(kind=NodeKind.MAP, parallel=1000)}, {"m": Assumption(2, items=100_000)})
    assert (found.takes_s, found.slots) == (200, 1000)
